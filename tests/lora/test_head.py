# .venv/bin/python -m pytest tests/lora/test_head.py
"""The head's adapter equals PEFT's on Hugging Face's model beyond the losses and gradients of
test_lora.py: several targets per position, the most likely tokens, generated tokens."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.lora.layers import Adapters
from megatron_vlm.model import log_probs
from megatron_vlm.training.generate import generate
from megatron_vlm.training.generation_batch import whole_logits
from megatron_vlm.training.worker import MegatronWorker
from tests.lora.test_lora import (
    BATCHES,
    CASES,
    HEAD,
    SLICES,
    TOLERANCE,
    VOCAB,
    at_once,
    compared,
    marked,
    mutant,
    with_adapter,
)
from tests.lora.test_lora import adapters as adapters
from tests.lora.test_lora import pytestmark as pytestmark  # PEFT's warnings
from tests.model.test_top_log_probs import asked_rows
from tests.support.batches import make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.peft_reference import as_ours, peft_model, trained
from tests.support.reference import row_logits
from tests.support.runs import Outcome, call, collect_grads, outcome_of
from tests.training.test_decode import continue_row
from tests.training.test_prompt_targets import targeted

NAMES = marked(("head-tied-tp2", "head-pp2", "head-1x1x1"), (), ("head-tied-tp2",))


def of_targets(worker: MegatronWorker, rows: list[Row]) -> Any:
    with at_once(SLICES):
        result = (
            local_group(worker)
            .forward_backward(
                rows, return_per_token_outputs=True, loss="weighted_cross_entropy", divisor=1.0
            )
            .result()
        )
    return result.loss, result.log_probs, collect_grads(worker)


def targets_by_peft(model: Any, rows: list[Row]) -> Any:
    total, all_log_probs = torch.zeros(()), []
    for row in rows:
        assert row.targets is not None
        targets = row.targets.view(len(row.ids_S), -1)
        log_probs = row_logits(model, row).float().log_softmax(-1)
        picked = log_probs.gather(-1, targets.clamp(min=0)) * (targets != IGNORE)
        total = total - (picked * row.values_S["weights"].view_as(targets)).sum()
        all_log_probs.append(picked.detach().view(row.targets.shape))
    total.backward()
    grads = {name: param.grad.clone() for name, param in trained(model).items()}  # type: ignore[union-attr]
    return float(total.detach()), all_log_probs, as_ours(model, grads)


@pytest.mark.parametrize("name", NAMES)
def test_several_targets_a_place(name, pool, tiny, adapters, record_property):
    chosen, rows = CASES[name], targeted(True)
    case, path = with_adapter(chosen, adapters), tiny(**chosen.sizes)
    loss, log_probs, grads = targets_by_peft(peft_model(path, chosen.adapter), rows)
    actual = pool.run(call, case.world, path, case, partial(of_targets, rows=rows))[0]
    assert actual[2].keys() == grads.keys()
    errors = relative_errors(actual[2], grads) | {"loss": abs(actual[0] / loss - 1)}
    for number, (a, b) in enumerate(zip(actual[1], log_probs, strict=True)):
        errors[f"log-probs {number}"] = float((a - b).abs().max())
    check_worst(errors, TOLERANCE, record_property)


def asked(worker: MegatronWorker, rows: list[Row]) -> Any:
    with at_once(SLICES):
        return (
            local_group(worker).likeliest(rows, 5, 0.7).result(),
            generate(worker.stage, rows, 6, (), batch_rows=3),
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_likeliest_and_what_is_generated(name, pool, tiny, adapters, record_property):
    chosen, rows = CASES[name], asked_rows()
    case, path = with_adapter(chosen, adapters), tiny(**chosen.sizes)
    model, ask = peft_model(path, chosen.adapter).eval(), partial(asked, rows=rows)
    most_likely, generated = pool.run(call, case.world, path, case, ask)[0]
    worst = 0.0
    for row, actual in zip(rows, most_likely, strict=True):
        with torch.no_grad():
            log_probs = (row_logits(model, row).float() / 0.7).log_softmax(-1)
        places = row.targets != IGNORE
        expected = log_probs.topk(5).values[places]
        worst = max(worst, float((actual[places][..., 1] - expected).abs().max()))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    continued = [continue_row(model, row, count=6) for row in rows]
    assert min(min(each.margins) for each in continued) > 1e-4
    assert generated == [each.ids for each in continued]


def both_ways(worker: MegatronWorker, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Return the log-probs of targets, and those computed from the logits at their places."""
    (chunk,), stage = worker.chunks, worker.stage
    [batch] = stage.arrivals(worker.micro_batches(rows), chunk)
    with stage.evaluating():
        log_probs_M = stage.predict(chunk, batch).log_probs_M
        logits_Nv = stage.call(chunk, batch, loss_mask=batch.places_N)
    assert batch.targets is not None and batch.targets.of_M is None
    logits_NV = whole_logits(logits_Nv, VOCAB, worker.grid.tp)
    return log_probs_M, logits_NV.log_softmax(-1).gather(1, batch.targets.ids_M[:, None])[:, 0]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_those_that_targets_are_scored_by(
    precision, pool, tiny, adapters, record_property
):
    """The logits are summed in fp32 also for bf16, so that a sample has the log-probs of the
    forward. Measured: 4.8e-7; with the sum in bf16 9.7e-4."""
    chosen, train = CASES["head-tied-tp2"], {"precision": precision, "micro_batch_size": 5}
    case, ask = with_adapter(chosen, adapters, train=train), partial(both_ways, rows=asked_rows())
    pairs = pool.run(call, 2, tiny(**chosen.sizes), case, ask)
    worst = max(float((scored_M - from_logits_M).abs().max()) for scored_M, from_logits_M in pairs)
    record_property("worst", worst)
    assert worst <= 4e-6


def waiting(worker: MegatronWorker, rows: list[Row]) -> tuple[int, int]:
    """Return how many weights are still gathered after a step, and after the next forward."""
    worker.forward_backward(rows)
    worker.optim_step(lr=1e-3)
    after_step = len(worker.gather.pending)
    worker.forward_backward(rows)
    return after_step, len(worker.gather.pending)


def test_a_forward_waits_for_the_heads_new_weights(pool, tiny):
    """They are not part of what runs before the head, whose own layer is not called."""
    chosen = CASES["head-alone-dp2-overlap"]
    case = replace(chosen.case, lora=chosen.adapter.ours)
    ask = partial(waiting, rows=make_rows(BATCHES["mixed"], VOCAB)[:2])
    assert pool.run(call, 2, tiny(**chosen.sizes), case, ask) == [(1, 0)] * 2


# Mutants.


def unscaled(right: Any, adapters: Adapters, x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    low, up = right(adapters, x, *more)
    return low / adapters.scale, up


def not_attached(right: Any, adapters: Adapters, x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return right(adapters, x.detach(), *more)


def not_summed_over_tp(right: Any, tensor: Tensor, *args: Any, **more: Any) -> Any:
    is_of_adapter = tensor.dim() == 2 and tensor.shape[1] == HEAD.rank
    return None if is_of_adapter else right(tensor, *args, **more)


def only_in_the_first_slice(right: Any, ctx: Any, *given: Any) -> list[Any]:
    whole = right(ctx, *given)
    ctx.slices = ctx.slices[:1]
    return [*whole[:2], *right(ctx, *given)[2:]]


def not_in_the_logits_again(right: Any, ctx: Any, *grads: Tensor) -> Any:
    """Compute the logits of the backward pass without the adapter."""
    logits_of = log_probs.logits_of

    def wrong(products: log_probs.Products, *span: int) -> Tensor:
        return logits_of(log_probs.Products(products.factors[:1]), *span)

    with mock.patch.object(log_probs, "logits_of", wrong):
        return right(ctx, *grads)


MUTANTS = {
    "unscaled": (Adapters, "factors", unscaled),
    "not summed over TP": (log_probs.dist, "all_reduce", not_summed_over_tp),
    "only in the first slice": (log_probs, "factor_gradients", only_in_the_first_slice),
    "not in the logits again": (log_probs._Predict, "backward", not_in_the_logits_again),
    "no gradient through A": (Adapters, "factors", not_attached),
}


def broken(worker: MegatronWorker, rows: list[Row]) -> dict[str, Outcome]:
    """Return the outcome of each mutant, and at the end that of the code as it is."""
    outcomes = {}
    for name, patch in {**MUTANTS, "none": None}.items():
        with mutant(*patch) if patch else nullcontext(), at_once(SLICES):
            outcomes[name] = outcome_of(worker, rows)
    return outcomes


@pytest.mark.full
def test_parity_notices_mutants(pool, tiny, adapters, record_property):
    chosen = CASES["head-tied-tp2"]
    case, rows = with_adapter(chosen, adapters), make_rows(BATCHES[chosen.batch], VOCAB)
    outcomes = pool.run(call, 2, tiny(**chosen.sizes), case, partial(broken, rows=rows))
    expected = adapters[1](chosen.adapter, chosen.key, chosen.batch)
    worst = {
        name: max(compared([each[name] for each in outcomes], expected, case).values())
        for name in outcomes[0]
    }
    record_property("worst", worst)
    assert worst.pop("none") <= TOLERANCE
    assert min(worst.values()) > 100 * TOLERANCE, worst
