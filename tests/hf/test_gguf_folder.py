# .venv/bin/python -m pytest tests/hf/test_gguf_folder.py; tests/engines/test_llama_cpp.py runs it
"""GGUF files of an export, read back: every tensor, field and token is where llama.cpp has it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.hf import gguf_folder
from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.hf.weight_map import exported_names, name_table
from megatron_vlm.hf.write_export import write_folder
from tests.support.error_fields import raises
from tests.support.moe import opened, stored_as

NET = dict(family="qwen3_5", linear_value_heads=6, linear_value_dim=16, mtp_layers=1)
CASES = {
    "dense": ("float32", dict(deepstack=2)),
    "bf16": ("bfloat16", dict(deepstack=1, vision_depth=1, tied=True)),
    "experts": ("float32", dict(experts=4, layers=3, deepstack=2)),
    "qwen3_5": ("float32", NET),
    "qwen3_5-experts": ("bfloat16", dict(NET, experts=4)),
    "gemma4": ("float32", dict(family="gemma4")),
    "gemma4-experts": ("bfloat16", dict(family="gemma4", experts=4, full_attention_interval=2)),
}
# Names of a layer in transformers and in GGUF.
LAYER = """input_layernorm attn_norm|self_attn.q_proj attn_q|self_attn.k_proj attn_k
self_attn.v_proj attn_v|self_attn.o_proj attn_output|self_attn.q_norm attn_q_norm
self_attn.k_norm attn_k_norm|post_attention_layernorm ffn_norm|mlp.gate_proj ffn_gate
mlp.up_proj ffn_up|mlp.down_proj ffn_down|mlp.gate ffn_gate_inp|mlp.experts.gate_proj ffn_gate_exps
mlp.experts.up_proj ffn_up_exps|mlp.experts.down_proj ffn_down_exps
mlp.shared_expert.gate_proj ffn_gate_shexp|mlp.shared_expert.up_proj ffn_up_shexp
mlp.shared_expert.down_proj ffn_down_shexp|mlp.shared_expert_gate ffn_gate_inp_shexp
linear_attn.in_proj_qkv attn_qkv|linear_attn.in_proj_z attn_gate|linear_attn.in_proj_a ssm_alpha
linear_attn.in_proj_b ssm_beta|linear_attn.conv1d ssm_conv1d|linear_attn.norm ssm_norm
linear_attn.out_proj ssm_out"""
BLOCK = """attn.qkv attn_qkv|attn.proj attn_out|norm1 ln1|norm2 ln2|mlp.linear_fc1 ffn_up
mlp.linear_fc2 ffn_down"""
OTHERS = {
    "lm_head": "output",
    "model.language_model.embed_tokens": "token_embd",
    "model.language_model.norm": "output_norm",
    "model.visual.pos_embed": "v.position_embd",
    "model.visual.patch_embed.proj": "v.patch_embd",
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
    "model.vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "model.embed_vision.embedding_projection": "mm.input_projection",
    "model.vision_tower": "v",  # std_bias and std_scale
}
GEMMA4 = """input_layernorm.weight attn_norm.weight|layer_scalar layer_output_scale.weight
post_attention_layernorm.weight post_attention_norm.weight
pre_feedforward_layernorm.weight ffn_norm.weight|router.proj.weight ffn_gate_inp.weight
pre_feedforward_layernorm_2.weight pre_ffw_norm_2.weight|router.scale ffn_gate_inp.scale
post_feedforward_layernorm.weight post_ffw_norm.weight
post_feedforward_layernorm_1.weight post_ffw_norm_1.weight
post_feedforward_layernorm_2.weight post_ffw_norm_2.weight
router.per_expert_scale ffn_down_exps.scale|experts.down_proj ffn_down_exps.weight
experts.gate_up_proj ffn_gate_up_exps.weight"""
GEMMA4_BLOCK = """input_layernorm ln1|post_attention_layernorm attn_post_norm
pre_feedforward_layernorm ln2|post_feedforward_layernorm ffn_post_norm|self_attn.o_proj attn_out"""


def pairs(table: str) -> dict[str, str]:
    return dict(pair.split() for pair in re.split(r"[|\n]", table))


def gguf_name(name: str, deepstack: list[int], kind: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{suffix}"
    if suffix == "position_embedding_table":
        return "v.position_embd.weight"
    number, rest = re.fullmatch(r"\D+?\.(\d+)\.(.+)", name).groups()
    stem = rest.rpartition(".")[0].removesuffix(".linear")
    if "vision_tower" in name:
        return f"v.blk.{number}.{(pairs(LAYER) | pairs(GEMMA4_BLOCK))[stem]}.{suffix}"
    if kind == "gemma4" and rest in pairs(GEMMA4):
        return f"blk.{number}.{pairs(GEMMA4)[rest]}"
    if "deepstack" in name:
        return f"v.deepstack.{deepstack[int(number)]}.{rest.replace('linear_', '')}"
    if "visual" in name:
        return f"v.blk.{number}.{pairs(BLOCK)[stem]}.{suffix}"
    if suffix in ("A_log", "dt_bias"):
        return f"blk.{number}." + {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[suffix]
    ours = pairs(LAYER)[stem]
    if kind.startswith("qwen3_5") and ours == "ffn_norm":
        ours = "post_attention_norm"
    return f"blk.{number}.{ours}.{suffix}"


def expected(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors by their names in GGUF, written out anew."""
    text, is_qwen3_5 = config["text_config"], config["model_type"].startswith("qwen3_5")
    deepstack = config["vision_config"].get("deepstack_visual_indexes", [])
    weights = {n: v.float().numpy() for n, v in load_file(folder / "model.safetensors").items()}
    single = [re.fullmatch(r"(.+\.experts)\.\d+(\..+)", name) for name in weights]
    for name, layer, leaf in [(found[0], *found.groups()) for found in single if found]:
        weights.setdefault(layer + leaf, []).append(weights.pop(name))
    found = {}
    for name, value in weights.items():
        if name.startswith("mtp."):
            continue
        value = np.stack(value) if isinstance(value, list) else value
        if is_qwen3_5 and "visual" not in name and name.endswith("norm.weight"):
            value = value + 1 if "linear_attn" not in name else value
        if ".linear_attn." in name and "norm" not in name:
            value = with_heads_in_turn(name, value, text)
        ours = gguf_name(name, deepstack, config["model_type"])
        if "patch_embedder.input_proj" in name:
            side = config["vision_config"]["patch_size"]
            found[ours] = value.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        elif ours == "v.patch_embd.weight":
            found[ours], found[f"{ours}.1"] = value[:, :, 0], value[:, :, 1]
        else:
            found[ours] = value
    if config["model_type"] == "gemma4":  # of 24 pairs of a head in full layers, a quarter turns
        found["rope_freqs.weight"] = np.float32([1.0] * 6 + [1e30] * 18)
    return found


def with_heads_in_turn(name: str, value: np.ndarray, text: dict[str, Any]) -> np.ndarray:
    """Head number n of the file belongs to key head n % keys."""
    keys, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    order = [n % keys * (heads // keys) + n // keys for n in range(heads)]
    of_keys = 2 * keys * text["linear_key_head_dim"]
    if name.endswith("A_log"):
        value = -np.exp(value)
    if name.endswith("conv1d.weight"):
        value = value[:, 0]
    if "out_proj" in name:
        return np.concatenate([np.split(value, heads, axis=1)[n] for n in order], axis=1)
    first = of_keys if "qkv" in name or "conv1d" in name else 0
    split = np.split(value[first:], heads)
    return np.concatenate([value[:first], *(split[n] for n in order)])


def export(path: str | Path, out: Path) -> None:
    source = opened(path)
    dims = ParallelDims.create(ParallelConfig(), 1, source.sizes.text.num_layers)
    names = exported_names(name_table(source.sizes, "torch", dims))
    shapes = source.sizes.shapes
    named = ((name, source.read(name, [(0, shapes[name][0])])) for name in names)
    write_folder(source, names, named, out, 300_000, change=gguf_folder.gguf_change())


def values_in(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return the fields, the values and the types of a file."""
    reader, values = gguf.GGUFReader(file), {}
    for each in reader.tensors:
        shape = tuple(int(side) for side in reversed(each.shape))
        values[each.name] = gguf.quants.dequantize(each.data, each.tensor_type).reshape(shape)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, values, {each.name: each.tensor_type.name for each in reader.tensors}


@pytest.mark.parametrize("name", CASES)
def test_files_have_every_tensor_as_llama_cpp_has_it(name, tiny, tmp_path):
    dtype, sizes = CASES[name]
    path = Path(tiny(dtype, **sizes))
    single = path
    if name == "experts":  # as released, and in single matrices for what is expected
        path = Path(stored_as(str(path), tmp_path / "stored", ExpertStorage.in_out))
        single = Path(stored_as(str(single), tmp_path / "one", ExpertStorage.single))
    export(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors*"))
    config = json.loads((path / "config.json").read_text())
    right = expected(single, config)
    decoder, tower = (values_in(tmp_path / f"out/{part}.gguf") for part in ("model", "mmproj"))
    assert not decoder[1].keys() & tower[1].keys()
    found, types = decoder[1] | tower[1], decoder[2] | tower[2]
    assert found.keys() == right.keys()
    for each, value in right.items():
        error = 2.0**-22 if each.endswith("ssm_a") else 0.0  # an exponential, of NumPy and of torch
        np.testing.assert_allclose(found[each], value, rtol=error, atol=0.0, err_msg=each)
        is_matrix = value.ndim > 1 and not re.search("_inp|conv1d|position|patch", each)
        kept = {"float32": "F32", "bfloat16": "BF16"}[dtype]
        assert types[each] == (kept if is_matrix else "F32"), each


def test_fields_are_those_of_the_checkpoint(tiny, tmp_path):
    path = Path(tiny(deepstack=2))
    export(path, tmp_path / "out")
    fields, *_ = values_in(tmp_path / "out/model.gguf")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    pieces = {**tokenizer["model"]["vocab"], **ids}
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    spare = range(len(pieces), 512)
    assert tokens == [*sorted(pieces, key=pieces.get), *(f"[PAD{number}]" for number in spare)]
    assert kinds[len(pieces) :] == [5] * len(spare)
    assert kinds[ids["<|im_end|>"]] == 3 and kinds[ids["<think>"]] == 4 and kinds[0] == 1
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    assert fields["tokenizer.ggml.merges"] == merges
    template = (path / "chat_template.jinja").read_text()
    assert fields["tokenizer.chat_template"] == template
    assert {name: fields[name] for name in FIELDS} == FIELDS | {
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"]
    }
    fields, *_ = values_in(tmp_path / "out/mmproj.gguf")
    assert {name: fields[name] for name in OF_TOWER} == OF_TOWER
    assert fields["clip.vision.attention.layer_norm_epsilon"] == pytest.approx(1e-6)


def test_fields_of_gemma_are_those_of_the_checkpoint(tiny, tmp_path):
    path = Path(tiny(family="gemma4"))
    export(path, tmp_path / "out")
    fields, *_ = values_in(tmp_path / "out/model.gguf")
    ids = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces = tokenizer.convert_ids_to_tokens(range(512))
    assert fields["tokenizer.ggml.tokens"] == pieces
    kinds = dict(zip(pieces, fields["tokenizer.ggml.token_type"], strict=True))
    assert kinds["<0x41>"] == 6 and kinds["▁"] == kinds["▁▁"] == 1 and len(ids) <= 512
    assert kinds["<|image|>"] == kinds["<bos>"] == 3 and kinds["<|tool_call>"] == 4
    assert {name: fields[name] for name in GEMMA4_FIELDS} == GEMMA4_FIELDS
    fields, *_ = values_in(tmp_path / "out/mmproj.gguf")
    assert fields["clip.vision.projector_type"] == "gemma4v"
    assert fields["clip.vision.image_mean"] == [0.0] * 3


GEMMA4_FIELDS = {
    "general.architecture": "gemma4",
    "gemma4.attention.head_count": 4,
    "gemma4.attention.head_count_kv": [4, 4, 4, 2],
    "gemma4.attention.key_length": 48,
    "gemma4.attention.key_length_swa": 24,
    "gemma4.attention.sliding_window": 32,
    "gemma4.attention.sliding_window_pattern": [True, True, True, False],
    "gemma4.rope.dimension_count": 48,
    "gemma4.rope.freq_base": 1e6,
    "gemma4.rope.freq_base_swa": 1e4,
    "gemma4.final_logit_softcapping": 30.0,
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.add_bos_token": True,
}


FIELDS = {
    "general.architecture": "qwen3vl",
    "general.file_type": 0,
    "qwen3vl.block_count": 4,
    "qwen3vl.context_length": 32768,
    "qwen3vl.embedding_length": 64,
    "qwen3vl.feed_forward_length": 176,
    "qwen3vl.attention.head_count": 4,
    "qwen3vl.attention.head_count_kv": 2,
    "qwen3vl.attention.key_length": 24,
    "qwen3vl.rope.dimension_sections": [6, 3, 3, 0],
    "qwen3vl.rope.freq_base": 5e6,
    "qwen3vl.n_deepstack_layers": 2,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.eos_token_id": None,
}
OF_TOWER = {
    "general.architecture": "clip",
    "clip.projector_type": "qwen3vl_merger",
    "clip.vision.block_count": 3,
    "clip.vision.image_size": 128,
    "clip.vision.is_deepstack_layers": [False, True, True],
    "clip.vision.image_mean": [0.5] * 3,
}


def test_what_has_no_form_is_refused_by_name(tiny):
    some = opened(tiny(experts=4, dense_layers=1))
    uneven, judge = (opened(tiny(family="qwen3_5")) for _ in range(2))
    layers = uneven.sizes.text.layers
    text = replace(uneven.sizes.text, layers=(layers[3], *layers[:3]))
    uneven.sizes, judge.sizes = replace(uneven.sizes, text=text), judge.sizes.with_score()
    other, *gemmas = (opened(tiny(family="gemma4")) for _ in range(6))
    other.family = replace(other.family, model_type="other")
    sees, turns, pools, heads, wide = gemmas
    sees.config.text_config.use_bidirectional_attention = None
    turns.config.vision_config.rope_parameters["rope_theta"] = 10.0
    for each, more in ((pools, dict(merge=2)), (wide, dict(query=48))):
        each.sizes = replace(each.sizes, vision=replace(each.sizes.vision, **more))
    first, *rest = heads.sizes.text.layers
    first = replace(first, mixer=replace(first.mixer, head_dim=32))
    heads.sizes = replace(heads.sizes, text=replace(heads.sizes.text, layers=(first, *rest)))
    for source, what in (
        (other, "model_type other"),
        (sees, "use_bidirectional_attention=None"),
        (turns, "rope_theta=10.0 in the tower"),
        (pools, "pooling_kernel_size=2"),
        (wide, "not as wide"),
        (heads, "heads of another width"),
        (some, "experts in some of the layers"),
        (uneven, "full attention in layers [0]"),
        (judge, "reward models"),
    ):
        with raises(CheckpointError, key="--as", found="gguf", problem_has=what):
            gguf_folder._check_model(gguf, source)


def test_what_has_no_name_is_refused(tiny, tmp_path):
    strange, out = tmp_path / "strange", tmp_path / "out"
    shutil.copytree(tiny(), strange)
    file = strange / "tokenizer.json"
    file.write_text(file.read_text().replace("?i:", "?:"))
    with raises(CheckpointError, key="pre_tokenizer", problem_has="pattern"):
        export(strange, out)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL, 1)
    table.mapping.pop("model.norm")
    with (
        mock.patch.object(gguf, "get_tensor_name_map", lambda *of: table),
        raises(CheckpointError, key="model.norm.weight", problem_has="no name"),
    ):
        export(tiny(layers=1), out)
    with (
        mock.patch.dict("sys.modules", {"gguf": None}),
        raises(ConfigError, key="--as", remedy_has="megatron_vlm[gguf]"),
    ):
        export(tiny(), out)
    assert not out.exists()
