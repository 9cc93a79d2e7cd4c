"""Weights in: each rank reads from the safetensors shards just the slices it holds."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.names import Entry
from megatron_vlm.hf.source import Source


def expected_shapes(hf_config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, with its shape."""
    text = hf_config.text_config
    hidden, ffn, head = text.hidden_size, text.intermediate_size, text.head_dim
    q, kv = text.num_attention_heads * head, text.num_key_value_heads * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    prefix = "model.language_model."
    shapes = {f"model.visual.{name}": shape for name, shape in vision_shapes(hf_config).items()}
    shapes[prefix + "embed_tokens.weight"] = (text.vocab_size, hidden)
    shapes[prefix + "norm.weight"] = (hidden,)
    for number in range(text.num_hidden_layers):
        shapes |= {f"{prefix}layers.{number}.{name}": shape for name, shape in layer.items()}
    if not hf_config.tie_word_embeddings:
        shapes["lm_head.weight"] = (text.vocab_size, hidden)
    return shapes


def vision_shapes(hf_config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tower's parameters, asked of Hugging Face's own module without making its weights."""
    with torch.device("meta"), no_init_weights():
        tower = Qwen3VLVisionModel(hf_config.vision_config)
    return {name: tuple(param.shape) for name, param in tower.named_parameters()}


def check_tensors(source: Source) -> None:
    """Compare the shards' headers with what the config asks for; list every difference."""
    expected = expected_shapes(source.config)
    found = {name: info.shape for name, info in source.tensors.items()}
    if source.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # some writers store the tied head as well
    lists = {
        "missing": [f"{name} {expected[name]}" for name in sorted(expected.keys() - found.keys())],
        "surplus": [f"{name} {found[name]}" for name in sorted(found.keys() - expected.keys())],
        "misshapen": [
            f"{name} is {found[name]}, config.json asks for {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ],
    }
    if any(lists.values()):
        text = "\n".join(
            f"{len(names)} {kind}:\n  " + "\n  ".join(names)
            for kind, names in lists.items()
            if names
        )
        raise CheckpointError(f"{source.path} does not fit its config.json\n{text}")


def load_hf(model: torch.nn.Module, source: Source, table: Sequence[Entry]) -> None:
    """Fill this rank's parameters from the checkpoint."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    params = dict(model.named_parameters())
    entries = [entry for entry in table if entry.stage == stage]
    assert {entry.ours for entry in entries} == set(params), (
        f"the name table and the model differ: {({e.ours for e in entries}) ^ set(params)}"
    )
    with torch.no_grad():
        for entry in entries:
            loaded = entry.layout.load(source.read, entry.theirs, rank, ranks)
            param = params[entry.ours]
            assert loaded.shape == param.shape, (entry.ours, loaded.shape, param.shape)
            param.copy_(loaded)
    source.close()
