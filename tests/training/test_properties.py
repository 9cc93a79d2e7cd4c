# .venv/bin/python -m pytest tests/training/test_properties.py
"""Properties of any batch: order, pictures, precision, and the files of an export."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_vlm.hf.model_card import CARD
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, RowSpec, make_rows
from tests.support.reference import run_reference
from tests.support.runs import Case, call, loss_and_grads
from tests.support.suites import FULL, quick

# Padding and neighbouring rows do not change a row's log-probs beyond the rounding of GEMMs of
# another shape. Measured: 9.5e-7 absolute.
ORDER_TOLERANCE = 5e-6
# The test is bf16 at TP2 x PP2 against Hugging Face in bf16. Measured: log-probs 2.5e-3 absolute,
# loss 6.5e-6 relative, cosine of the worst gradient 0.9996.
BF16_LOG_PROB_TOLERANCE = 0.02
BF16_LOSS_TOLERANCE = 6e-5
BF16_COSINE = 0.997


def _forward_orders(worker: MegatronWorker) -> list[list[torch.Tensor]]:
    rows = make_rows(MIXED)
    order = [3, 6, 0, 7, 2, 5, 1, 4]
    return [worker.forward(rows), worker.forward([rows[i] for i in order]), order]


def test_permuted_rows_permute_log_probs(pool, tiny, record_property):
    straight, permuted, order = pool.run(call, 4, tiny(), layout(tp=2, pp=2), _forward_orders)[0]
    worst = max(
        float((permuted[place] - straight[row]).abs().max()) for place, row in enumerate(order)
    )
    record_property("log_probs", worst)
    assert worst <= ORDER_TOLERANCE
    assert (straight[0][-1] - straight[1][-1]).abs() > 1e-3  # the rows differ


def _forward_pictures(worker: MegatronWorker) -> list[torch.Tensor]:
    (row,) = make_rows((RowSpec(9, images=((4, 6),)),))
    other = replace(row, pixel_values_PC=row.pixel_values_PC.flip(0))
    return [worker.forward([row])[0], worker.forward([other])[0]]


def test_other_pictures_give_other_log_probs(pool, tiny):
    """The flipped patches hold the same values, and only their positions differ."""
    one, other = pool.run(call, 2, tiny(), layout(pp=2), _forward_pictures)[0]
    assert (one - other).abs().max() > 100 * ORDER_TOLERANCE


@FULL
def test_bf16_at_tp2_pp2(pool, tiny, record_property):
    case = replace(layout(tp=2, pp=2), train={"precision": "bf16"})
    rows = make_rows(MIXED)
    expected = run_reference(tiny(dtype="bfloat16"), rows, torch.bfloat16)
    outcome = pool.run(loss_and_grads, case.world, tiny(dtype="bfloat16"), case, rows)[0]
    worst = max(
        float((a - b).abs().max())
        for a, b in zip(outcome.log_probs, expected.log_probs, strict=True)
    )
    loss_error = abs(outcome.loss / expected.loss - 1)
    record_property("log_probs", worst)
    record_property("loss", loss_error)
    assert worst <= BF16_LOG_PROB_TOLERANCE
    assert loss_error <= BF16_LOSS_TOLERANCE
    for name, grad in outcome.grads.items():  # the direction of every gradient
        expected_grad = expected.grads[name].float()
        cosine = torch.nn.functional.cosine_similarity(
            grad.flatten(), expected_grad.flatten(), dim=0
        )
        record_property(f"cosine {name}", float(cosine))
        assert cosine > BF16_COSINE, f"{name}: {cosine:.4f}"


def test_loss_does_not_depend_on_the_micro_batches(pool, tiny):
    rows = make_rows(MIXED)
    losses = {
        size: pool.run(
            loss_and_grads,
            1,
            tiny(**SHALLOW),
            replace(layout(), train={"micro_batch_size": size}),
            rows,
        )[0].loss
        for size in (1, 3, 8)
    }
    assert losses[3] == pytest.approx(losses[1], rel=1e-6)
    assert losses[8] == pytest.approx(losses[1], rel=1e-6)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


EXPORTED = {
    "untied": {},
    "tied-odd": {"tied": True, "vocab": 509},
    "qwen3_5": {"family": "qwen3_5", "mtp_layers": 1},
    "qwen3_5-tied": {"family": "qwen3_5", "mtp_layers": 1, "tied": True},
}


QUICK = [("tied-odd", "float32"), ("qwen3_5", "bfloat16")]
KINDS = product(EXPORTED, ("float32", "bfloat16"))


@pytest.mark.parametrize("kind", quick(QUICK, KINDS), ids="-".join)
def test_load_then_export_is_bit_equal(kind, pool, tiny, tmp_path):
    """An export has the files of its source, tensor for tensor, and a card, also at PP=2 x TP=2 and
    from interleaved stages."""
    model, dtype = kind
    source = Path(tiny(dtype=dtype, **EXPORTED[model]))
    exports = {}
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    layouts = {"1x1": layout(), "2x2": layout(tp=2, pp=2), "pp2x2": layout(pp=2, virtual_stages=2)}
    for name, case in layouts.items():
        case = replace(case, train={"precision": precision})
        out = tmp_path / name
        pool.run(export_to, case.world, str(source), case, str(out))
        exports[name] = files(out)
    assert exports["1x1"] == exports["2x2"] == exports["pp2x2"]
    assert exports["1x1"].keys() == files(source).keys() | {CARD}
    for name, content in files(source).items():
        if name.endswith(".safetensors"):
            assert tensors(tmp_path / "1x1" / name) == tensors(source / name)
        else:
            assert exports["1x1"][name] == content, name


def export_to(path: str, case: Case, out: str) -> None:
    MegatronWorker(case.config(path)).export_hf(out)


def tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return every tensor's dtype, shape and bytes, read without safetensors' own classes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {
        name: (info["dtype"], info["shape"], data[slice(*info["data_offsets"])])
        for name, info in header.items()
    }
