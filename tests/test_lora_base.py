# .venv/bin/python -m pytest tests/test_lora_base.py
"""Frozen weights beside adapters in 4 or 8 bits (lora.base), apart from their products, which
tests/test_lora.py compares with PEFT's: codes, memory, files of bitsandbytes, exports, refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.config.base_weights import base_bytes
from megatron_vlm.hf.block_codes import NF4_VALUES, BlockCodes, rounded
from megatron_vlm.hf.block_weight import BlockWeight
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.planner.parameters import count
from megatron_vlm.training.worker import MegatronWorker
from tests.batches import MIXED, make_rows
from tests.reference import load_reference, row_log_probs
from tests.runs import Case
from tests.test_lora import BLOCKS, EXPERTS_IN_BLOCKS
from tests.test_parity import layout

CPU = torch.device("cpu")
NF4 = dict(rank=4, targets=("attention", "mlp"), base="nf4")
SMALL = dict(BLOCKS, layers=2, vision_depth=1, deepstack=1)
BLOCK = 64
SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_values_of_codes_become_the_same_codes(base):
    """So a checkpoint of codes can be read as values."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(96, 64, generator=generator) * torch.rand(96, 1, generator=generator)
    weights[3] = 0
    weights[5] *= 1e-30
    values = rounded(weights, base)
    codes, again = (BlockCodes.empty(base, weights.numel(), CPU) for _ in range(2))
    codes.encode(weights)
    again.encode(values)
    assert torch.equal(codes.codes_K, again.codes_K) and torch.equal(codes.scales_B, again.scales_B)
    assert torch.equal(rounded(values, base), values) and not values[3].any()
    largest = weights.abs().amax(1)
    assert torch.equal(values.abs().amax(1), largest)
    widest = max(b - a for a, b in zip(NF4_VALUES, NF4_VALUES[1:], strict=False))
    half = widest / 2 if base == "nf4" else 0.5 / 127
    assert bool(((values - weights).abs() <= (half + 1e-6) * largest[:, None]).all())
    stored = codes.codes_K.nbytes + codes.scales_B.nbytes
    assert stored == base_bytes(base) * weights.numel()


def test_a_weight_of_codes_cannot_be_changed_by_mistake():
    weight = BlockWeight.empty("nf4", torch.Size([4, 64]), torch.float32, CPU)
    weight.codes.encode(torch.ones(4, 64))
    with torch.no_grad(), pytest.raises(AssertionError, match="copy_"):
        weight.copy_(torch.zeros(4, 64))
    assert torch.equal(weight.dequantize(), torch.ones(4, 64))
    assert type(weight + 1) is Tensor


def held_bytes(worker: MegatronWorker) -> tuple[int, int]:
    """Return the bytes of this rank's weights: as they are, and as the planner counts them."""
    total = 0
    for param in worker.held.values():
        if isinstance(param, BlockWeight):
            total += param.codes.codes_K.nbytes + param.codes.scales_B.nbytes
        else:
            total += param.nbytes
    counts = count(worker.cfg, worker.source.sizes, worker.dims, worker.grid.pp.rank)
    return total, counts.weight_bytes(worker.cfg.lora.base, 4)


def held_by(path: str, case: Case) -> tuple[int, int]:
    return held_bytes(MegatronWorker(case.config(path), training=False))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [(layout(tp=2, pp=2), BLOCKS), (layout(dp=2, ep=2), EXPERTS_IN_BLOCKS)],
)
def test_the_planner_knows_the_bytes(case, sizes, pool, tiny):
    for base in ("nf4", "int8"):
        on_ranks = pool.run(
            held_by, case.world, tiny(**sizes), replace(case, lora=dict(NF4, base=base))
        )
        assert all(held == planned for held, planned in on_ranks), on_ranks


# Checkpoints in the form of bitsandbytes. test_codes_and_files_are_those_of_bitsandbytes compares
# this form with its own.


def write_in_blocks(
    folder: Path, out: Path, chosen: Callable[[str], bool], nested: bool = True
) -> None:
    """Write a copy of a checkpoint with these matrices in NF4. If the scales are codes of 8 bits,
    they have a simpler map than that of bitsandbytes."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if chosen(each)]:
        weight = tensors[name]
        codes = BlockCodes.empty("nf4", weight.numel(), CPU)
        codes.encode(weight)
        state = dict(quant_type="nf4", blocksize=BLOCK, dtype="float32", shape=list(weight.shape))
        sides = {"absmax": codes.scales_B, "quant_map": torch.tensor(NF4_VALUES)}
        if nested:
            scales, mean = codes.scales_B, float(codes.scales_B.mean())
            padded = torch.nn.functional.pad(scales - mean, (0, -len(scales) % 256)).view(-1, 256)
            factors, steps = padded.abs().amax(1), torch.linspace(-1, 1, 256)
            shares = (padded / factors[:, None]).flatten()[: len(scales)]
            sides["absmax"] = (shares[:, None] - steps).abs().argmin(1).to(torch.uint8)
            sides |= {"nested_absmax": factors, "nested_quant_map": steps}
            state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=mean)
        tensors[name] = codes.codes_K[:, None]
        tensors |= {f"{name}.{side}": value for side, value in sides.items()}
        tensors[f"{name}.{STATE}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    change_config(out, quantization_config=QUANTIZATION)


QUANTIZATION = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def is_linear(name: str) -> bool:
    """Return whether transformers would store this tensor in 4 bits."""
    is_matrix = name.endswith((".weight", "_proj")) and "norm" not in name and "embed" not in name
    return is_matrix and name != "lm_head.weight" and not name.endswith("mlp.gate.weight")


def change_tensors(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of a checkpoint, or remove them."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changed
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def in_blocks(tiny, tmp_path_factory):
    """Return the folder of a tiny checkpoint in 4 bits, with scales in 8 bits."""
    out = tmp_path_factory.mktemp("blocks") / "nested"
    write_in_blocks(Path(tiny(**SMALL)), out, is_linear)
    return out


def held_codes(worker: MegatronWorker) -> dict[str, list[Tensor]]:
    return {
        entry.ours: [param.codes.codes_K, param.codes.scales_B]
        for entry, param in worker.held.items()
        if isinstance(param, BlockWeight)
    }


def test_a_checkpoint_in_4_bits_is_read_as_it_is(pool, tiny, in_blocks, tmp_path):
    """Its codes are kept, also where a rank reads a part of them, and what is not in 4 bits there
    is not put into 4 bits."""
    whole = HFCheckpoint(in_blocks)
    whole.read_headers()
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    value = whole.read(name, ())
    assert value.dtype is torch.float32 and torch.equal(rounded(value, "nf4"), value)
    assert torch.equal(whole.read(name, ((16, 48), (64, 128))), value[16:48, 64:])
    assert whole.tensors[name].dtype == "F32" and whole.tensors[name].shape == (64, 128)
    plain = HFCheckpoint(tiny(**SMALL))
    plain.read_headers()
    assert whole.tensors.keys() == plain.tensors.keys()
    error = float((value - plain.read(name, ())).norm() / value.norm())
    assert 0.05 < error < 0.15  # 4 bits

    some = tmp_path / "some"
    write_in_blocks(Path(tiny(**SMALL)), some, lambda n: is_linear(n) and "k_proj" not in n, False)
    rows = make_rows(MIXED, 512)
    for folder, left_out in ((in_blocks, False), (some, True)):
        outputs = []
        for case in (layout(), layout(tp=2, pp=2)):
            case = replace(case, lora=NF4)
            outputs.append(pool.run(scores_and_names, case.world, str(folder), case, rows)[0])
        (scores, names), (on_four_ranks, _) = outputs
        assert ("decoder.layers.0.self_attention.linear_qkv.weight" in names) != left_out
        assert "decoder.layers.0.mlp.linear_fc1.weight" in names
        model = load_reference(tiny(**SMALL))
        source = HFCheckpoint(folder)
        source.read_headers()
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(source.read(key, ()))
            for row, ours, others in zip(rows, scores, on_four_ranks, strict=True):
                expected = row_log_probs(model, row)
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
                torch.testing.assert_close(ours, others, atol=1e-4, rtol=0)


def scores_and_names(path: str, case: Case, rows: list) -> tuple[list[Tensor], list[str]]:
    worker = MegatronWorker(case.config(path), training=False)
    return worker.forward(rows), list(held_codes(worker))
