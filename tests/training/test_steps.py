# .venv/bin/python -m pytest tests/training/test_steps.py
"""Three AdamW steps with clipping and weight decay give Hugging Face's weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from pytest import approx
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.family import read_family
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.pool import Pool
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, train
from tests.support.suites import quick

OPTIM = dict(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
STEPS = 3
# Adam divides a gradient by its own size: where one is near zero, rounding alone can decide the
# sign of a full step. So weights are compared in units of the learning rate.
MEAN_TOLERANCE_LR = 3e-4  # mean difference of the worst tensor; measured 3.0e-5
MAX_TOLERANCE_LR = 0.2  # worst single weight; measured 0.020
NORM_TOLERANCE = 8e-6  # gradient norm before clipping, relative; measured 8.9e-7

DEEP = SHALLOW | {"layers": 4}  # for two stages on each of two ranks
GEMMA4 = {"family": "gemma4", "layers": 2, "vision_depth": 1, "tied": True}
CASES = {
    "1x1x1": (layout(), SHALLOW),
    "1x1x1-plain-optimizer": (layout(distributed_optimizer=False), SHALLOW),
    "dp2": (layout(dp=2), SHALLOW),
    "dp2-plain-optimizer": (layout(dp=2, distributed_optimizer=False), SHALLOW),
    "tp2-pp2": (layout(tp=2, pp=2, layers_per_stage=[0, 2]), SHALLOW),
    "tp2-dp2-overlap": (layout(tp=2, dp=2, overlap_grad_reduce=True), SHALLOW),
    "dp2-overlap-all": (layout(dp=2, overlap_grad_reduce=True, overlap_param_gather=True), SHALLOW),
    "tied-pp2-dp2": (layout(pp=2, dp=2), DEEP | {"tied": True}),
    "tied-pp2x2-dp2-overlap": (
        layout(pp=2, dp=2, virtual_stages=2, overlap_grad_reduce=True),
        DEEP | {"tied": True},
    ),
    "gemma4-tp2-pp2": (layout(tp=2, pp=2), GEMMA4),
    "gemma4-experts-ep2": (layout(dp=2, ep=2), GEMMA4 | {"experts": 4}),
    "gemma4-dp2-offload": (replace(layout(dp=2), optim={"offload": 0.5}), GEMMA4),
    "vision-frozen": (layout(pp=2, freeze_vision=True, freeze_merger=True), SHALLOW),
    "language-frozen": (layout(pp=2, freeze_language=True), DEEP),
    "language-frozen-pp2x2-dp2": (layout(pp=2, dp=2, virtual_stages=2, freeze_language=True), DEEP),
}


def batches(family: str):
    kind = "gemma4" if family == "gemma4" else "qwen3_vl"
    return [make_rows(MIXED, seed=seed, family=kind) for seed in range(STEPS)]


def reference_steps(path: str, frozen: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """The same with torch alone."""
    model = load_reference(path)
    named = {name: p for name, p in model.named_parameters() if part_of(name) not in frozen}
    for name, param in model.named_parameters():
        param.requires_grad_(name in named)
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"])
    norms = []
    for rows in batches(model.config.model_type):
        count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)
        for row in rows:
            loss = -row_log_probs(model, row).sum() / count
            if loss.requires_grad:
                loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIM["clip_grad"])))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def part_of(name: str) -> str:
    return "language" if ".visual." not in name else "merger" if "merger" in name else "vision"


@pytest.fixture(scope="module")
def reference(tiny):
    return cache(lambda path, frozen: reference_steps(path, frozen))


@pytest.mark.parametrize("name", quick(("dp2", "tp2-pp2"), CASES))
def test_weights_after_three_steps(name, pool, tiny, reference, record_property):
    case, sizes = CASES[name]
    check_weights(case, tiny(**sizes), bool(sizes.get("tied")), pool, reference, record_property)


def check_weights(case, path, tied, pool, reference, record_property):
    case = Case(case.world, case.model, case.parallel, OPTIM | case.optim)
    frozen = tuple(
        part for part in ("vision", "merger", "language") if f"freeze_{part}" in case.model
    )
    want_norms, want = reference(path, frozen)
    _, norms, weights = pool.run(
        train, case.world, path, case, batches(read_family(path).model_type)
    )[0]
    assert norms == pytest.approx(want_norms, rel=NORM_TOLERANCE)
    assert weights.keys() <= want.keys()
    assert len(weights) == len(want) - ("lm_head.weight" in want and tied)
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, want_norms, strict=True))
    record_property("norm", norm_error)
    check_apart(weights, want, MEAN_TOLERANCE_LR, record_property)


def check_apart(weights, want, mean_tolerance, record_property):
    """Compare weights in units of the learning rate."""
    apart = {n: (weights[n] - want[n]).abs() / OPTIM["lr"] for n in weights}
    mean, most = (max(float(f(each)) for each in apart.values()) for f in (torch.mean, torch.max))
    record_property("mean", mean)
    record_property("max", most)
    assert mean <= mean_tolerance and most <= MAX_TOLERANCE_LR, (mean, most)


# Replicas take unequal numbers of micro-batches, so that stages send unequally often.
CHECKED = {
    "pp2-dp2": (layout(pp=2, dp=2), SHALLOW),
    "pp2x2-dp2": (layout(pp=2, dp=2, virtual_stages=2), DEEP),
    "pp4": (layout(pp=4), DEEP),
    "pp4x2": (layout(pp=4, virtual_stages=2), DEEP | {"layers": 9}),
    "tp2-pp2": (layout(tp=2, pp=2), SHALLOW),
    "ep2": (layout(dp=2, ep=2), SHALLOW | {"experts": 4}),
}


def train_with_checks(*what):
    """Train under torch's checks of each collective, as with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        losses, norms, _ = train(*what)
        dist.barrier()
        return losses, norms
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@pytest.fixture(scope="module")
def joining(process_tree):
    """Processes whose worker makes all groups, also that of the whole job."""
    pool = Pool(process_tree.fork, as_launched=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", quick(["pp2-dp2", "pp4"], CHECKED))
def test_torchs_checks_of_collectives_find_nothing(name, joining, tiny):
    case, sizes = CHECKED[name]
    case = replace(case, train={"micro_batch_size": 1})
    path, rows = tiny(**sizes), [make_rows(MIXED[:5])]
    losses, norms = joining.run(train_with_checks, case.world, path, case, rows)[0]
    expected = joining.run(train_with_checks, 1, path, layout(), rows)[0]
    assert (losses, norms) == (approx(expected[0]), approx(expected[1], rel=NORM_TOLERANCE))
