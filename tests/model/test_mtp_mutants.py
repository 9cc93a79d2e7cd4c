# .venv/bin/python -m pytest -m full tests/model/test_mtp_mutants.py
"""The comparison of an MTP head with the formula notices each fault that the trainers of
others have, or could have."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.model import mtp_head
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.mtp_head import MtpHead
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.mtp_loss import MtpTerm
from tests.model.test_mtp_head import EXPERTS, FAMILY, TOLERANCE
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.comparison import relative_errors, same
from tests.support.mtp_reference import PREFIX, run_drafts
from tests.support.reference import reference_of
from tests.support.runs import Case, Outcome, loss_and_grads

pytestmark = [pytest.mark.newest, pytest.mark.full]

DRAFTING = StageModel._drafting


def head(change: Callable[..., tuple[Any, ...]]) -> Any:
    """Return a mutant whose head reads other inputs than it should."""
    right = MtpHead.forward
    return mock.patch.object(MtpHead, "forward", lambda self, *x: right(self, *change(*x)))


def drafting(wrong: Callable[..., Any]) -> Any:
    return mock.patch.object(StageModel, "_drafting", wrong)


def before_the_norm(self: StageModel, *given: Any) -> Any:
    norm, self.decoder.final_layernorm = self.decoder.final_layernorm, nn.Identity()
    draft = DRAFTING(self, *given)
    self.decoder.final_layernorm = norm
    return draft


def plain_positions(self: StageModel, carry: Any, output: Any, ids: Any, given: Any) -> Any:
    return DRAFTING(self, carry, output, torch.arange(ids.shape[2]).expand_as(ids), given)


def attached(self: StageModel, carry: Any, output: Any, *given: Any) -> Any:
    draft = DRAFTING(self, carry, output, *given)
    return partial(draft.func, draft.args[0], output, *draft.args[2:])


def placeholders(self: StageModel, carry: Any, output: Any, ids: Any, given: Any) -> Any:
    with torch.no_grad():
        plain = replace(carry, input_SBH=self._embed(given.ids_BS))
    return DRAFTING(self, plain, output, ids, given)


def swapped() -> Any:
    name = "linear_with_grad_accumulation_and_async_allreduce"
    right = getattr(mtp_head, name)
    wrong = lambda x, *more, **k: right(torch.cat(x.chunk(2, -1)[::-1], -1), *more, **k)  # noqa: E731
    return mock.patch.object(mtp_head, name, wrong)


def text_carries_nothing() -> Any:
    right = Carry.extras

    def wrong(sizes: Any, dims: Any, place: int, has_images: bool, learns: bool = True) -> int:
        return right(sizes, dims, place, has_images, learns and has_images)

    return mock.patch.object(Carry, "extras", wrong)


def main_divisor() -> Any:
    right = MtpTerm.added_to

    def wrong(self: MtpTerm, step: Any) -> Any:
        grid, counts = self.stage.grid, [batch.num_supervised for batch in self.batches]
        sums = grid.sum_of_replicas
        with mock.patch.object(type(grid), "sum_of_replicas", lambda *_: sums(*[sum(counts)] * 2)):
            return right(self, step)

    return mock.patch.object(MtpTerm, "added_to", wrong)


ONE, TWO_STAGES = layout(), layout(pp=2)
MUTANTS: dict[str, tuple[Callable[[], Any], Case, dict[str, Any]]] = {
    "h before the final norm": (lambda: drafting(before_the_norm), ONE, {}),
    "the rope position of i + 1": (
        lambda: head(lambda e, h, rotary, *x: (e, h, rotary.roll(-1, 1), *x)),
        ONE,
        {},
    ),
    "positions 0, 1, 2": (lambda: drafting(plain_positions), ONE, {}),
    "the placeholder's embedding": (lambda: drafting(placeholders), ONE, {}),
    "e_i": (lambda: head(lambda e, *x: (e.roll(1, 0), *x)), ONE, {}),
    "e_i is carried": (lambda: head(lambda e, *x: (e.roll(1, 0), *x)), TWO_STAGES, {}),
    "halves of fc swapped": (swapped, ONE, {}),
    "the label of i + 1": (
        lambda: head(lambda e, h, rotary, ctx, at: (e, h, rotary, ctx, at + e.shape[1])),
        ONE,
        {},
    ),
    "a gradient into the model": (lambda: drafting(attached), ONE, EXPERTS),
    "text carries nothing": (text_carries_nothing, TWO_STAGES, {}),
    "the divisor of the model's loss": (main_divisor, ONE, {}),
}


def mutated(name: str, path: str, case: Case, rows: list[Row]) -> Outcome:
    with MUTANTS[name][0]():
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name, pool, tiny, record_property):
    _, case, sizes = MUTANTS[name]
    path, rows = tiny(**FAMILY, **sizes), make_rows(MIXED)
    training = replace(case, model={"mtp": "train"})
    try:
        wrong = pool.run(partial(mutated, name), case.world, path, training, rows)[0]
    except RuntimeError as error:
        assert "the next stage waits for" in str(error) and name == "text carries nothing"
        return
    expected = reference_of(path, MIXED, run=run_drafts).grads
    worst = max(relative_errors(wrong.grads, expected).values())
    record_property("worst", worst)
    if name == "a gradient into the model":
        plain = pool.run(loss_and_grads, case.world, path, case, rows)[0].grads
        own = {n: grad for n, grad in wrong.grads.items() if not n.startswith(PREFIX)}
        assert not same(plain, own) and worst < TOLERANCE
    else:
        assert worst > 100 * TOLERANCE, worst
