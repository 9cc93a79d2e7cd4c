# .venv/bin/python -m pytest tests/model/test_row_independence.py
"""Rows of a micro-batch do not leak into one another through the states of gated delta nets.

When one row changes, the log-probs, the gradients and the answers of the other rows stay the same
to the last bit. The mutants at the end show that these tests can fail.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.model import fused_ops, gated_delta_net
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_mutants import (
    convolution_across_rows,
    of_rule,
    replaced,
    state_kept_between_rows,
)
from tests.model.test_parity import full, layout
from tests.support.batches import MIXED, make_rows
from tests.support.runs import Case, call, collect_grads
from tests.training.test_decode import QWEN3_5

CHANGED = 1  # of eight rows, in micro-batches of four
ROWS = make_rows(MIXED)
TEXT = 250  # ordinary ids are below this one, see tests/support/batches.py


def changed(rows: list[Row]) -> list[Row]:
    """Return the rows with other text and pixels in one of them, which keeps its length."""
    row, rows = rows[CHANGED], list(rows)
    ids_S = torch.where(row.ids_S < TEXT, (row.ids_S + 77) % TEXT, row.ids_S)
    pixels_PC = None if row.pixel_values_PC is None else -row.pixel_values_PC
    rows[CHANGED] = replace(row, ids_S=ids_S, pixel_values_PC=pixels_PC)
    return rows


def without_loss(rows: list[Row]) -> list[Row]:
    rows = list(rows)
    none_S = torch.full_like(rows[CHANGED].labels_S, IGNORE)
    rows[CHANGED] = replace(rows[CHANGED], labels_S=none_S)
    return rows


@dataclass(frozen=True)
class Leaks:
    """By how much other rows moved when one row changed: the largest difference of a log-prob, of
    one of their answers, and of a gradient (the norm, relative to its own)."""

    forward: float
    decode: float
    backward: float


def leaks(worker: MegatronWorker) -> Leaks:
    settings = SamplingSettings(4, temperature=0.7)
    found = []
    for rows in (ROWS, changed(ROWS)):
        log_probs = worker.forward(rows)
        answers = worker.sample(rows, settings, 2, list(range(0, 16, 2)), batch_rows=6)
        worker.forward_backward(without_loss(rows))
        found.append((log_probs, list(chain.from_iterable(answers)), collect_grads(worker)))
    (log_probs, answers, grads), (others, other_answers, other_grads) = found
    of_changed = slice(2 * CHANGED, 2 * CHANGED + 2)
    assert apart(answers[of_changed], other_answers[of_changed]) > 0
    del answers[of_changed], other_answers[of_changed], log_probs[CHANGED], others[CHANGED]
    return Leaks(
        max(float((a - b).abs().max()) for a, b in zip(log_probs, others, strict=True)),
        apart(answers, other_answers),
        max(
            (
                float((grad - other_grads[name]).norm() / grad.norm())
                for name, grad in grads.items()
            ),
            default=0.0,  # gradients are collected on rank 0
        ),
    )


def apart(before: list[Completion], after: list[Completion]) -> float:
    """Return the largest difference of a log-prob, which is infinite where tokens differ."""
    pairs = list(zip(before, after, strict=True))
    if any(a.ids != b.ids for a, b in pairs):
        return math.inf
    return max(abs(x - y) for a, b in pairs for x, y in zip(a.log_probs, b.log_probs, strict=True))


LAYOUTS: dict[str, tuple[Case, dict[str, Any], float]] = {
    "1x1x1": (layout(), QWEN3_5, 0.0),
    "tp2-pp2": (layout(tp=2, pp=2), QWEN3_5, 0.0),
    # The products of an expert have as many rows as tokens go to it, so the order of their sums
    # depends on the other rows of a pass. Measured: 4.8e-7.
    "experts": (layout(), {**QWEN3_5, "experts": 4}, 5e-6),
}


def case_of(name: str) -> Case:
    return replace(LAYOUTS[name][0], train={"micro_batch_size": 4})


@pytest.mark.parametrize("name", [name if name == "1x1x1" else full(name) for name in LAYOUTS])
def test_a_row_that_changes_moves_no_other_row(name, pool, tiny, record_property):
    case, (_, sizes, bar) = case_of(name), LAYOUTS[name]
    for found in pool.run(call, case.world, tiny(**sizes), case, leaks):
        record_property("leaks", str(found))
        assert max(vars(found).values()) <= bar


def types_of_states(worker: MegatronWorker) -> set[tuple[torch.dtype, torch.dtype]]:
    """Return the types of the states after the prefill and after each token."""
    seen = set()
    right = worker.stage.run

    def run(items, *rest, **more):
        out = right(items, *rest, **more)
        for item in items:
            seen.update((window.dtype, state.dtype) for window, state in item.cache.states.values())
        return out

    worker.stage.run = run
    worker.sample(ROWS, SamplingSettings(3, temperature=0), batch_rows=3)
    return seen


def test_states_are_in_fp32_where_weights_are_in_bf16(pool, tiny):
    path = tiny(**QWEN3_5, dtype="bfloat16")
    case = replace(layout(), train={"precision": "bf16"})
    assert pool.run(call, 1, path, case, types_of_states) == [{(torch.bfloat16, torch.float)}]


def state_of_another_row(right: Any) -> Any:
    """Let each row of a decoding pass continue with the state of the row before it."""
    return lambda *inputs: right(*inputs[:-1], inputs[-1].roll(1, 0))


MUTANTS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "state carried on": (of_rule(state_kept_between_rows), {"forward", "decode", "backward"}),
    "convolution across rows": (
        replaced(fused_ops, "convolve", convolution_across_rows),
        {"forward", "decode", "backward"},
    ),
    "another row's state": (
        replaced(gated_delta_net, "delta_step", state_of_another_row),
        {"decode"},
    ),
}


def broken(path: str, case: Case, name: str) -> Leaks:
    with MUTANTS[name][0]():
        return call(path, case, leaks)


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_leaks_are_noticed(name, pool, tiny):
    [found] = pool.run(broken, 1, tiny(**QWEN3_5), case_of("1x1x1"), name)
    assert {kind for kind, size in vars(found).items() if size} == MUTANTS[name][1]
