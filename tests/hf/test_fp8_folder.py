# .venv/bin/python -m pytest tests/hf/test_fp8_folder.py; tests/engines/test_fp8_vllm.py has vLLM
"""An export in FP8 has the decoder's matrices in blocks, and every other tensor as it was."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.hf.fp8_folder import quantize, to_fp8
from megatron_vlm.hf.weight_map import exported_names, name_table
from megatron_vlm.hf.write_export import write_folder
from tests.support.error_fields import raises
from tests.support.moe import opened, stored_as

SIDES = dict(hidden=128, intermediate=256, heads=4, kv_heads=4, head_dim=32, vision_depth=1)
MOE = dict(**SIDES, experts=2, expert_intermediate=256)
NET = dict(linear_key_dim=64, linear_value_dim=32, shared_expert_intermediate=128, mtp_layers=1)
_TEXT = r"model\.language_model\.layers\.\d+\."
_EXPERT = r"mlp\.experts\.\d+\.(gate|up|down)_proj"
_LINEAR = (
    r"self_attn\.[qkvo]_proj|mlp\.(shared_expert\.)?(gate|up|down)_proj|"
    rf"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|{_EXPERT}"
)


def export(path: str, out: Path, max_shard_bytes: int = 10**9) -> None:
    source = opened(path)
    dims = ParallelDims.create(ParallelConfig(), 1, source.sizes.text.num_layers)
    names = exported_names(name_table(source.sizes, "torch", dims))
    shapes = source.sizes.shapes
    named = ((name, source.read(name, [(0, shapes[name][0])])) for name in names)
    write_folder(source, names, named, out, max_shard_bytes, change=to_fp8)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def spread(scales: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        (dict(SIDES, deepstack=1), None),
        (dict(MOE, deepstack=1), ExpertStorage.in_out),
        (dict(MOE, deepstack=1), ExpertStorage.out_in),
        (dict(MOE, **NET, family="qwen3_5"), ExpertStorage.single),
    ],
    ids=["dense", "in_out", "out_in", "qwen3_5"],
)
def test_matrices_of_the_decoder_are_in_blocks(sizes, form, tiny, tmp_path):
    before, out = tiny(**sizes), tmp_path / "out"
    path = before if form is None else stored_as(before, tmp_path / "stored", form)
    export(path, out, 300_000)
    single = before if form is None else stored_as(before, tmp_path / "one", ExpertStorage.single)
    expected, found = tensors_in(Path(single)), tensors_in(out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    linears = {name for name in expected if re.fullmatch(f"{_TEXT}({_LINEAR}).weight", name)}
    assert {name for name in found if found[name].dtype == torch.float8_e4m3fn} == linears
    assert found.keys() == expected.keys() | {f"{name}_scale" for name in linears}
    for name, value in expected.items():
        if name not in linears:
            assert torch.equal(found[name], value), name
            continue
        scales = spread(found[f"{name}_scale"])
        error = (found[name].float() * scales - value).abs()
        # Half of the last place, of normal numbers and of those below 2**-6.
        assert (error <= torch.maximum(value.abs() / 16, scales / 1024) * (1 + 1e-5)).all(), name
        blocks = found[name].float().abs().view(len(value) // 128, 128, -1, 128)
        assert (blocks.amax(dim=(1, 3)) == 448).all()
    others = {n[:-7] for n, v in expected.items() if v.ndim == 2 and n.endswith(".weight")}
    assert set(config["ignore"]) == others - {name[:-7] for name in linears} | {"lm_head"}
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: file for file, held in files.items() for n in held}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_neighbours_keep_their_dtype_together(tiny, tmp_path):
    """Engines compute gate and up as one matrix, and q, k and v."""
    export(tiny(**dict(SIDES, kv_heads=2, deepstack=1)), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    quantized = {name for name, value in found.items() if value.dtype == torch.float8_e4m3fn}
    assert quantized and all(".mlp." in name for name in quantized)
    with raises(CheckpointError, key="--as", found="fp8", problem_has="multiples of 128"):
        export(tiny(), tmp_path / "none")


def test_codes_are_for_the_scales_that_are_stored():
    """In bf16 a scale is rounded first. A block of zeros stays one."""
    weight = torch.randn(256, 128, generator=torch.manual_seed(0)).bfloat16()
    weight[128:] = 0
    codes, scales = quantize(weight)
    assert scales.dtype == torch.bfloat16 and scales.shape == (2, 1)
    error = (codes.float() * spread(scales.float()) - weight.float()).abs()
    bound = torch.maximum(weight.float().abs() / 16, spread(scales.float()) / 1024)
    assert (error <= bound * (1 + 1e-5)).all() and not codes[128:].float().any()
