# .venv/bin/python -m pytest tests/test_model_fields.py
"""Every field of config.json is carried out as transformers carries it out, or refused by name."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.training.worker import MegatronWorker
from tests.batches import MIXED, make_rows
from tests.reference import load_reference, row_log_probs, run_reference
from tests.runs import Case, loss_and_grads
from tests.test_parity import layout

# The error is relative, as in test_parity.py. Measured worst case over all cases: 2.9e-7.
TOLERANCE = 2e-6
TINY = dict(layers=2, vision_depth=2, deepstack=1)

# Other values of the fields that are carried out. Shapes follow them.
CARRIED: dict[str, Any] = {
    "image_token_id": 476,
    "video_token_id": 477,
    "tie_word_embeddings": True,
    "text_config.vocab_size": 509,
    "text_config.hidden_size": 48,
    "text_config.intermediate_size": 160,
    "text_config.num_hidden_layers": 3,
    "text_config.num_attention_heads": 8,
    "text_config.num_key_value_heads": 4,
    "text_config.head_dim": 16,
    "text_config.max_position_embeddings": 1000,
    "text_config.rms_norm_eps": 1e-2,
    "text_config.rope_parameters.rope_theta": 1234.0,
    "text_config.rope_parameters.mrope_section": [6, 1, 1],
    "text_config.pad_token_id": 7,
    "vision_config.depth": 3,
    "vision_config.hidden_size": 48,
    "vision_config.hidden_act": "relu",
    "vision_config.intermediate_size": 72,
    "vision_config.num_heads": 4,
    "vision_config.in_channels": 1,
    "vision_config.patch_size": 8,
    "vision_config.spatial_merge_size": 1,
    "vision_config.temporal_patch_size": 1,
    "vision_config.num_position_embeddings": 30,
    "vision_config.deepstack_visual_indexes": [1, 0],
    "vision_config.rope_parameters.rope_theta": 100.0,
}
# Other values of the fields that change nothing, all at once.
_IDLE: dict[str, Any] = {
    "transformers_version": "4.57.1",
    "architectures": ["Other"],
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 2,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "initializer_range": 0.5,
}
IDLE: dict[str, Any] = {
    **{f"{part}{name}": value for part in ("", "text_config.", "vision_config.")
       for name, value in _IDLE.items()},
    "output_hidden_states": True,
    "text_config.output_hidden_states": True,
    "text_config.use_cache": False,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    # The classes of transformers do not declare these. It or other tools write them.
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 3,
    "eos_token_id": 3,
    "text_config.bos_token_id": 3,
    "text_config.eos_token_id": 3,
    "torch_dtype": "float32",
    "_name_or_path": "other",
    "attn_implementation": "eager",
    "temperature": 0.5,
    "hidden_size": 64,  # a copy of text_config's
    "text_config.use_sliding_window": False,
    "text_config.sliding_window": None,
    "text_config.max_window_layers": 28,
    "text_config.layer_types": ["full_attention", "full_attention"],
    "text_config.rope_parameters.type": "mrope",
    "quantization_config": None,
}  # fmt: skip
# Refused values of declared fields, and of others that transformers acts upon.
REFUSED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "model_type": "qwen2_vl",
    "rope_parameters": {"rope_type": "yarn"},
    "quantization_config": {"quant_method": "fp8"},
    "transformers_weights": "other.safetensors",
    "auto_map": {"AutoModel": "x.y"},
    "return_dict": False,
    "text_config.return_dict": False,
    "text_config.is_encoder_decoder": True,
    "text_config.model_type": "qwen3",
    "text_config.hidden_act": "gelu",
    "text_config.attention_bias": True,
    "text_config.attention_dropout": 0.1,
    "text_config.tie_word_embeddings": True,  # but not at the top level
    "text_config.sliding_window": 8,
    "text_config.use_sliding_window": True,
    "text_config.layer_types": ["full_attention", "sliding_attention"],
    "text_config.attention_chunk_size": 8,
    "text_config.is_causal": False,
    "text_config.per_layer_config": {"1": {"rms_norm_eps": 0.1}},
    "text_config.partial_rotary_factor": 0.5,
    "text_config.num_experts": 8,
    "text_config.scale_embeddings": True,  # a field of unknown meaning
    "text_config.num_attention_heads": 3,
    "text_config.num_key_value_heads": 3,
    "text_config.head_dim": 23,
    "text_config.pad_token_id": 512,
    "text_config.hidden_size": "wide",
    "text_config.rope_parameters.mrope_interleaved": False,
    "text_config.rope_parameters.mrope_section": [6, 6],
    "text_config.rope_parameters.type": "yarn",
    "text_config.rope_parameters.partial_rotary_factor": 0.5,
    "text_config.rope_parameters.factor": 2.0,
    "vision_config.is_encoder_decoder": True,
    "vision_config.model_type": "qwen2_5_vl",
    "vision_config.output_hidden_states": True,
    "vision_config.return_dict": False,
    "vision_config.gradient_checkpointing": True,
    "vision_config.head_dim": 8,
    "vision_config.num_heads": 3,
    "vision_config.patch_size": [16, 16],
    "vision_config.temporal_patch_size": [2, 2],
    "vision_config.out_hidden_size": 48,
    "vision_config.deepstack_visual_indexes": [0, 0],
    "vision_config.rope_parameters.rope_type": "linear",
    "vision_config.rope_parameters.partial_rotary_factor": 0.5,
    "image_token_id": 474,  # the id of videos
    "video_token_id": 512,
}
# One setting for each kind of RoPE in transformers, as a config.json asks for it.
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,  # newer versions declare this and the next two
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "short_factor": [1.5] * 12,
        "long_factor": [2.5] * 12,
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def test_every_field_of_transformers_is_in_these_tables():
    """A field that transformers adds fails this test: decide what it does, and add it to a
    table."""
    parts = {"": Qwen3VLConfig} | {f"{k}.": v for k, v in Qwen3VLConfig.sub_configs.items()}
    declared = {f"{part}{item.name}" for part, cls in parts.items() for item in fields(cls)}
    tables = {*CARRIED, *IDLE, *REFUSED}
    tables |= {name.rpartition(".")[0] for name in tables if name.count(".") == 2}
    assert declared - tables == {"text_config", "vision_config"}
    assert set(ROPE) == set(ROPE_INIT_FUNCTIONS)
    rope = {name.rpartition(".")[2] for name in tables if ".rope_parameters." in name}
    assert set(RopeParameters.__annotations__) <= rope.union(*ROPE.values())


def changed(path: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Write a copy of the checkpoint's config.json with other values to a folder of its own."""
    config = json.loads((Path(path) / "config.json").read_text())
    for key, value in changes.items():
        *parts, name = key.split(".")
        place = config
        for part in parts:
            place = place[part]
        place[name] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("field", REFUSED)
def test_refused_by_name(field, tiny, tmp_path):
    folder = changed(tiny(**TINY), tmp_path / "x", {field: REFUSED[field]})
    with pytest.raises(ConfigError) as caught:
        read_sizes(folder)
    assert field in str(caught.value) or field.rpartition(".")[2] in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", ROPE)
def test_other_kinds_of_rope_are_refused(kind, older, tiny, tmp_path):
    """RoPE is refused both as transformers 5 writes it and as older files have it."""
    text = json.loads((Path(tiny(**TINY)) / "config.json").read_text())["text_config"]
    rope = text["rope_parameters"] | {"rope_type": kind} | ROPE[kind]
    key = "rope_scaling" if older else "rope_parameters"
    folder = changed(tiny(**TINY), tmp_path / "x", {f"text_config.{key}": rope})
    with pytest.raises(ConfigError, match=rf"text_config\.rope_parameters\.rope_type='{kind}'"):
        read_sizes(folder)


def test_refused_before_a_process_group_is_made(tiny, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny(**TINY), folder)
    shutil.copy(
        changed(str(folder), tmp_path / "x", {"text_config.hidden_act": "gelu"}) / "config.json",
        folder,
    )
    with pytest.raises(ConfigError, match=r"text_config\.hidden_act='gelu'.*only 'silu'"):
        MegatronWorker(Case().config(str(folder)))
    assert not torch.distributed.is_initialized()


def make_row(config: Any, seed: int) -> Row:
    """Return text around one image of 4 x 2 merged patches, in the shapes of this config."""
    generator = torch.Generator().manual_seed(seed)
    vision = config.vision_config
    merge, values = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size
    text = torch.randint(0, 250, (20,), generator=generator)
    image = torch.full((8,), config.image_token_id)
    ids_S = torch.cat([text[:5], image, text[5:]])
    labels_S = torch.where(ids_S == config.image_token_id, IGNORE, ids_S)
    patches = 4 * 2 * merge**2
    pixels_PC = torch.randn(patches, values * vision.patch_size**2, generator=generator)
    return Row(ids_S, labels_S, pixels_PC, torch.tensor([[1, 4 * merge, 2 * merge]]))


def write_weights(folder: Path) -> None:
    """Write random weights of the shapes that config.json asks for, large enough that all count."""
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((param.dim() == 1) + 0.2 * torch.randn_like(param))
    tensors = dict(model.named_parameters())  # without a tied head
    save_file(
        {name: value.detach() for name, value in tensors.items()}, folder / "model.safetensors"
    )


def compare(folder: str) -> float:
    """Return the largest relative difference of log-probs from those of transformers."""
    write_weights(Path(folder))
    model = load_reference(folder).eval()
    rows = [make_row(model.config, seed) for seed in (0, 1)]
    with torch.no_grad():
        expected = [row_log_probs(model, row) for row in rows]
    actual = MegatronWorker(Case().config(folder), training=False).forward(rows)
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("part", ["idle", "top", "text_config", "vision_config"])
def test_carried_out_as_by_transformers(part, pool, tiny, tmp_path):
    """All fields of a part change at once: one that is not carried out is enough to differ."""
    changes = {name: value for name, value in CARRIED.items() if name.startswith(part)}
    if part == "idle":
        changes = IDLE
    elif part == "top":
        changes = {name: value for name, value in CARRIED.items() if "." not in name}
        changes["text_config.tie_word_embeddings"] = changes["tie_word_embeddings"]
    elif part == "text_config":
        changes["vision_config.out_hidden_size"] = changes["text_config.hidden_size"]
    folder = changed(tiny(**TINY), tmp_path / "x", changes)
    (error,) = pool.run(compare, 1, str(folder))
    assert error <= TOLERANCE, error


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_token_does_not_learn(tied, pool, tiny, tmp_path):
    """transformers uses the token's embedding, and only a tied head gives it a gradient."""
    rows = make_rows(MIXED[:4])
    pad = int(rows[2].ids_S[0])
    folder = tmp_path / "copy"
    shutil.copytree(tiny(tied=tied), folder)
    config = changed(str(folder), tmp_path / "x", {"text_config.pad_token_id": pad})
    shutil.copy(config / "config.json", folder)
    expected = run_reference(str(folder), rows)
    outcome = pool.run(loss_and_grads, 2, str(folder), layout(tp=2), rows)[0]
    embedding = "model.language_model.embed_tokens.weight"
    assert bool(expected.grads[embedding][pad].any()) == tied
    for name, grad in outcome.grads.items():
        expected_grad = expected.grads[name]
        assert float((grad - expected_grad).norm()) <= TOLERANCE * float(expected_grad.norm()), name


# model: (decoder layers, width, FFN width, heads, tied, depth of the tower, its width and FFN
# width, DeepStack)
RELEASED = {
    "2B": (28, 2048, 6144, 16, True, 24, 1024, 4096, [5, 11, 17]),
    "4B": (36, 2560, 9728, 32, True, 24, 1024, 4096, [5, 11, 17]),
    "8B": (36, 4096, 12288, 32, False, 27, 1152, 4304, [8, 16, 24]),
    "32B": (64, 5120, 25600, 64, False, 27, 1152, 4304, [8, 16, 24]),
}


def released(name: str) -> dict[str, Any]:
    """Return a config.json as transformers 4.57 wrote it for the released models."""
    layers, hidden, ffn, heads, tied, depth, width, vision_ffn, deepstack = RELEASED[name]
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": ffn,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": rope,
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": deepstack,
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": vision_ffn,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_accepted(name, tmp_path):
    """Released files are accepted as published, and as transformers writes them again."""
    (tmp_path / "config.json").write_text(json.dumps(released(name)))
    sizes = read_sizes(tmp_path)
    assert (sizes.text.num_layers, sizes.text.hidden, sizes.text.rope_theta) == (
        *RELEASED[name][:2],
        5e6,
    )
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert read_sizes(tmp_path / "again").tensors == sizes.tensors
