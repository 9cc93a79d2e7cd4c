# .venv/bin/python -m pytest tests/training/test_accumulate.py
"""Tests of accumulated gradients. The gradients of several calls add up, bit for bit, until a step
has used them; their sum equals the gradients of one call with all rows. An error in between leaves
the sum unchanged."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import DataError
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import same
from tests.support.runs import Case, call, collect_grads, my_rows
from tests.support.suites import in_turn

DIVISOR = 7.0
# Relative difference (norm over norm) between one call and three, which sum in another order. The
# measured worst case is 8.7e-7, with experts.
TOLERANCE = 5e-6
TOLERANCE_BF16 = 0.2  # other rows share a rounding; measured 6.2e-2

OVERLAP = dict(overlap_grad_reduce=True)
FP32 = replace(layout(dp=2), model={"fp32_weight_gradients": True}, train={"precision": "bf16"})


ADAPTERS = {"rank": 4, "targets": ("attention", "mlp", "merger", "vision_attention", "vision_mlp")}

CASES = {
    "tp2-pp2": (layout(tp=2, pp=2), {"tied": True, **SHALLOW}),
    "dp2": (layout(dp=2), SHALLOW),
    "dp2-plain-optimizer": (layout(dp=2, distributed_optimizer=False), SHALLOW),
    "pp2x2-dp2-overlap-tied": (
        layout(pp=2, dp=2, virtual_stages=2, overlap_param_gather=True, **OVERLAP),
        {"tied": True},
    ),
    "tp2-dp2-overlap": (layout(tp=2, dp=2, **OVERLAP), SHALLOW),
    "ep2": (layout(dp=2, ep=2), EXPERTS | SHALLOW),
    "ep2-pp2-overlap-losses": (
        layout(pp=2, dp=2, ep=2, router_balance_loss=0.1, router_z_loss=0.1, **OVERLAP),
        EXPERTS | SHALLOW,
    ),
    "ep2-plain-optimizer": (layout(dp=2, ep=2, distributed_optimizer=False), EXPERTS | SHALLOW),
    "vision-frozen": (layout(pp=2, freeze_vision=True, freeze_merger=True), SHALLOW),
    "language-frozen": (layout(pp=2, dp=2, freeze_language=True), SHALLOW),
    "fp32-weight-gradients": (FP32, SHALLOW),
    "adapters": (replace(layout(tp=2, dp=2), lora=ADAPTERS), SHALLOW),
}
LAST = ("tp2-dp2-overlap", "ep2-plain-optimizer", "dp2-plain-optimizer", "language-frozen")
MARKS = {"dp2": (), **dict.fromkeys(LAST, pytest.mark.slow)}
PARAMS = [pytest.param(name, marks=MARKS.get(name, in_turn(3, "added up"))) for name in CASES]


def grads_of(worker: MegatronWorker, *parts: list[Row]) -> dict[str, Tensor]:
    """Return the gradients after one call for each part."""
    for place, rows in enumerate(parts):
        worker.forward_backward(my_rows(rows), divisor=DIVISOR, accumulate=place > 0)
    return collect_grads(worker)


def several_ways(worker: MegatronWorker) -> dict[str, dict[str, Tensor]]:
    rows = make_rows(MIXED)
    first, second, third = rows[:4], rows[4:6], rows[6:]
    grads_of(worker, rows)  # from the second step on, reductions overlap
    worker.optim_step(lr=1e-3)
    grads = {str(n): grads_of(worker, part) for n, part in enumerate((first, second, third), 1)}
    unsupervised = [replace(row, labels_S=torch.full_like(row.labels_S, IGNORE)) for row in second]
    grads["sum"] = grads_of(worker, first, second, third, unsupervised)
    grads["of all"] = grads_of(worker, rows)
    grads_of(worker, rows, unsupervised)
    assert worker.optim_step(lr=0.0)[0] > 0
    worker.forward_backward(my_rows(third), divisor=DIVISOR, accumulate=True)
    grads["after a step"] = collect_grads(worker)
    return grads


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient. The gradients of frozen weights are nan in
    both."""
    errors = [0.0]
    for name, expected in theirs.items():
        if expected.isnan().all():
            assert ours[name].isnan().all()
        elif norm := float(expected.norm()):
            errors.append(float((ours[name] - expected).norm()) / norm)
        else:
            assert not ours[name].any()
    return max(errors)


@pytest.mark.parametrize("name", PARAMS)
def test_calls_add_up(name, pool, tiny, record_property):
    case, sizes = CASES[name]
    grads = pool.run(call, case.world, tiny(**sizes), case, several_ways)[0]
    added = {n: grads["1"][n] + grads["2"][n] + grads["3"][n] for n in grads["1"]}
    assert grads["1"] and same(grads["sum"], added)
    assert relative(grads["sum"], grads["1"]) > 0.01  # the other calls contribute
    assert same(grads["after a step"], grads["3"])  # the step has used up the sum
    error = relative(grads["sum"], grads["of all"])
    record_property("worst", error)
    if "router_balance_loss" not in case.model:  # a balance loss depends on the rows of its call
        assert error <= (TOLERANCE_BF16 if case is FP32 else TOLERANCE)


def dropped(worker: MegatronWorker) -> tuple[float, float]:
    rows = make_rows(MIXED)
    grads_of(worker, rows)
    worker.optim_step(lr=1e-2)
    added = grads_of(worker, rows[:4], rows[4:])
    return relative(added, grads_of(worker, rows)), relative(added, grads_of(worker, rows[:4]))


def test_dropout_goes_on_from_call_to_call(pool, tiny):
    """Two micro-batches of a step never have the same dropout."""
    case = replace(layout(), lora={**ADAPTERS, "dropout": 0.5})
    [(error, half_error)] = pool.run(call, 1, tiny(**SHALLOW), case, dropped)
    assert error <= TOLERANCE and half_error > 0.01


def broken(log_probs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if log_probs_N.numel():  # not in the dry run of a loss
        raise RuntimeError("of the loss")
    return log_probs_N, {}


def after_errors(worker: MegatronWorker) -> tuple[bool, ...]:
    """Return whether the first call's gradients remain after other calls have failed."""
    rows = make_rows(MIXED)
    first = grads_of(worker, rows[:4])
    bad = replace(rows[0], image_grid_I3=rows[0].image_grid_I3 * 2)
    checks = []
    with pytest.raises(DataError):
        worker.forward_backward([bad], accumulate=True)
    checks.append(same(collect_grads(worker), first))
    with pytest.raises(RuntimeError, match="of the loss"):  # after a micro-batch
        worker.forward_backward(rows, loss=broken, accumulate=True)
    checks.append(same(collect_grads(worker), first) and worker.gradients.micro_batches == 2)
    checks.append(worker.optim_step()[0] > 0 and worker.optim_step()[0] == 0)
    worker.forward_backward(rows)
    with pytest.raises(RuntimeError, match="of the loss"):
        worker.forward_backward(rows, loss=broken)
    checks.append(worker.optim_step()[0] == 0)
    return tuple(checks)


def test_an_error_leaves_what_was_added_up(pool, tiny):
    assert pool.run(call, 1, tiny(**SHALLOW), layout(), after_errors) == [(True,) * 4]


def through_a_group(path: str, case: Case) -> tuple[float, float, str, float, str]:
    group = local_group(MegatronWorker(case.config(path)))
    rows = make_rows(MIXED)
    bad = [*rows[:3], replace(rows[1], image_grid_I3=rows[1].image_grid_I3 * 2)]
    whole = group.forward_backward(rows, divisor=DIVISOR).result().loss
    norm = group.optim_step(lr=0.0).result()[0]
    losses = [
        group.forward_backward(part, divisor=DIVISOR, accumulate=True).result().loss
        for part in (rows[:3], rows[3:])
    ]
    refused = group.forward_backward(bad, accumulate=True).exception()
    again, _ = group.optim_step(lr=0.0).result()
    assert sum(losses) == pytest.approx(whole, rel=TOLERANCE)
    group.forward_backward(rows).result()
    group.forward_backward(bad)  # it replaces the gradients before, and no caller waits for it
    return norm, again, str(refused), str(group.optim_step().exception())


def test_a_group_adds_up(pool, tiny):
    found = pool.run(through_a_group, 4, tiny(**SHALLOW), layout(pp=2, dp=2))
    for norm, again, refused, lost in found:
        assert again == pytest.approx(norm, rel=TOLERANCE)
        assert "row 3: pixel_values has 28 patches" in refused
        assert re.match(r"rank \d: optim_step: ", lost)
