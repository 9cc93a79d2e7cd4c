"""Tiny checkpoints of Qwen3-VL and Qwen3.5: their config, a tokenizer that is trained here, the
chat template and the files of the processors."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, PretrainedConfig, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_vlm.family.added_tokens import add_to
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.family.tiny import CORPUS, TinyParts, TinySpec, check_vocab

_NAMES = """endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start
quad_end vision_start vision_end vision_pad image_pad video_pad"""
_TASK = "ForConditionalGeneration"
_CLASSES = {"qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
_TYPICAL = "model.language_model.embed_tokens.weight"  # it has the dtype of the model
SPECIAL_TOKENS = [f"<|{name}|>" for name in _NAMES.split()]
# Released tokenizers have these as tokens, too, and not as special ones.
BLOCK_TOKENS = [
    f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")
]

# It renders the same text as the template of the released Qwen3-VL.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


def _change_weights(model: Any, spec: TinySpec) -> None:
    """Draw the decays of gated delta nets anew, up to the largest one, and larger positions."""
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".A_log"):
                shares = torch.rand(param.shape, generator=generator)
                param.copy_((0.01 + (spec.max_decay - 0.01) * shares).log())
        if spec.from_scratch:
            # In fresh weights the positions are a fiftieth of the patch embeddings, so that a model
            # would learn the places of objects last.
            weight = model.model.visual.pos_embed.weight
            weight.copy_(torch.randn(weight.shape, generator=generator.manual_seed(spec.seed)))


def _add_mtp_head(weights: Path, sizes: ModelSizes, layers: int, seed: int) -> None:
    """Add the tensors of an MTP head ("multi-token prediction"), which transformers leaves
    out: a product that joins two hidden states, and layers of full attention."""
    assert sizes.mtp is not None
    params = list(sizes.mtp.params(sizes.text.hidden))
    shapes = {
        sizes.mtp.prefix + tensor.name.replace("layers.0.", f"layers.{number}."): tensor.shape
        for number in range(layers)
        for tensor in chain.from_iterable(param.tensors for param in params)
    }
    generator, tensors = torch.Generator().manual_seed(seed), load_file(weights)
    for name, shape in sorted(shapes.items()):
        value = 0.1 * torch.randn(shape, generator=generator)
        tensors[name] = value.to(tensors[_TYPICAL].dtype)
    save_file(tensors, weights, metadata={"format": "pt"})


def tiny_config(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> PretrainedConfig:
    """Return the same fields as the config.json of a released model of the family."""
    token = tokenizer.convert_tokens_to_ids
    # 0.02 suits thousands of inputs; with a hundred, the outputs would be almost 0.
    std = 0.08 if spec.from_scratch else 0.02
    is_qwen3_5 = spec.family == "qwen3_5"
    text_of_family = _qwen3_5_text(spec) if is_qwen3_5 else _qwen3_vl_text(spec)
    config: PretrainedConfig = AutoConfig.for_model(
        spec.family + "_moe" * bool(spec.experts),
        architectures=[f"{_CLASSES[spec.family]}{'Moe' * bool(spec.experts)}{_TASK}"],
        tie_word_embeddings=spec.tied,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        text_config=dict(
            vocab_size=spec.vocab,
            initializer_range=std,
            hidden_size=spec.hidden,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=32768,
            tie_word_embeddings=spec.tied,
            bos_token_id=token("<|endoftext|>"),
            eos_token_id=token("<|im_end|>"),
            **text_of_family,
            **({} if is_qwen3_5 else {"pad_token_id": token("<|endoftext|>")}),
        ),
        vision_config=dict(
            initializer_range=std,
            depth=spec.vision_depth,
            hidden_size=spec.vision_hidden,
            intermediate_size=spec.vision_intermediate,
            num_heads=spec.vision_heads,
            out_hidden_size=spec.hidden,
            patch_size=spec.patch_size,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=64,
            **({} if is_qwen3_5 else {"deepstack_visual_indexes": _deepstack_blocks(spec)}),
        ),
    )
    return config


def _rope(theta: float, frequencies: int, part: int) -> dict[str, Any]:
    """Return the settings of M-RoPE whose height and width have `part` frequencies each."""
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "mrope_section": [frequencies - 2 * part, part, part],
        "mrope_interleaved": True,
    }


def _qwen3_vl_text(spec: TinySpec) -> dict[str, Any]:
    # A released model splits 64 frequencies into 24, 20, 20; here 12 are split into 6, 3, 3.
    fields: dict[str, Any] = {
        "intermediate_size": spec.intermediate,
        "rope_parameters": _rope(5_000_000.0, spec.head_dim // 2, spec.head_dim // 8),
    }
    if spec.experts:
        fields |= dict(
            num_experts=spec.experts,
            num_experts_per_tok=spec.top_k,
            moe_intermediate_size=spec.expert_intermediate,
            decoder_sparse_step=spec.sparse_step,
            mlp_only_layers=list(range(spec.dense_layers)),
        )
    return fields


def _qwen3_5_text(spec: TinySpec) -> dict[str, Any]:
    # A released model splits 32 frequencies, of a quarter of each head, into 11, 11, 10.
    frequencies = spec.head_dim // 8
    rope = _rope(10_000_000.0, frequencies, frequencies // 3)
    fields: dict[str, Any] = {
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
        "layer_types": [
            "linear_attention" if (n + 1) % spec.full_attention_interval else "full_attention"
            for n in range(spec.layers)
        ],
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "linear_key_head_dim": spec.linear_key_dim,
        "linear_value_head_dim": spec.linear_value_dim,
        "linear_conv_kernel_dim": 4,
    }
    if spec.mtp_layers:
        fields |= {"mtp_num_hidden_layers": spec.mtp_layers, "mtp_use_dedicated_embeddings": False}
    if not spec.experts:
        return fields | {"intermediate_size": spec.intermediate}
    return fields | dict(
        num_experts=spec.experts,
        num_experts_per_tok=spec.top_k,
        moe_intermediate_size=spec.expert_intermediate,
        shared_expert_intermediate_size=spec.shared_expert_intermediate,
    )


def _deepstack_blocks(spec: TinySpec) -> list[int]:
    depth, count = spec.vision_depth, spec.deepstack
    spread = [(i + 1) * depth // (count + 1) for i in range(count)]
    return spread if depth > count else list(range(depth))


def train_tokenizer(vocab: int) -> Qwen2Tokenizer:
    """Train a BPE on a few sentences for Qwen's own tokenizer class, with named tokens last."""
    named = len(SPECIAL_TOKENS) + len(BLOCK_TOKENS)
    check_vocab(vocab, 256, named)
    qwen = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - named, initial_alphabet=letters, show_progress=False
    )
    core.train_from_iterator([CORPUS], trainer)
    model = json.loads(core.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )
    add_to(tokenizer, BLOCK_TOKENS)
    return tokenizer


def write_processor(out: Path, spec: TinySpec) -> None:
    """Write the files of the image and video processors, as released checkpoints have them."""
    settings: dict[str, Any] = {
        "patch_size": spec.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = Qwen2VLImageProcessorPil(**settings).to_dict()
    image["image_processor_type"] = "Qwen2VLImageProcessorFast"  # the name in released checkpoints
    video = {**settings, "video_processor_type": "Qwen3VLVideoProcessor"}
    for name, config in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        config["processor_class"] = "Qwen3VLProcessor"
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (out / f"{name}.json").write_text(text)


def tiny_parts(*sizes_of: Callable[[PretrainedConfig], ModelSizes]) -> TinyParts:
    """Return what a family has in a tiny checkpoint. `sizes_of`, of the models without and with
    experts, is given if they may have an MTP head."""

    def add_files(out: Path, spec: TinySpec, config: PretrainedConfig) -> None:
        if spec.mtp_layers and sizes_of:
            sizes = sizes_of[bool(spec.experts)](config)
            _add_mtp_head(out / "model.safetensors", sizes, spec.mtp_layers, spec.seed)
        write_processor(out, spec)

    fp32 = (".linear_attn.A_log", ".linear_attn.norm.weight")
    return TinyParts(train_tokenizer, tiny_config, _change_weights, add_files, fp32)
