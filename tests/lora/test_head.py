# .venv/bin/python -m pytest tests/lora/test_head.py
"""The head's adapter equals PEFT's on Hugging Face's model, tied or not, at each layout: losses,
every gradient, several targets per position, the most likely tokens, generated tokens, steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.lora.layers import Adapters
from megatron_vlm.model import log_probs
from megatron_vlm.model.log_probs import FactorGradients
from megatron_vlm.training.generate import generate
from megatron_vlm.training.token_sampling import whole_logits
from megatron_vlm.training.worker import MegatronWorker
from tests.lora.test_lora import (
    BATCHES,
    MAX_TOLERANCE_LR,
    MEAN_TOLERANCE_LR,
    NORM_TOLERANCE,
    OPTIM,
    STEPS,
    TOLERANCE,
    compared,
    marked,
)
from tests.model.test_parity import layout
from tests.model.test_top_log_probs import asked_rows
from tests.support.batches import make_rows
from tests.support.peft_reference import (
    Adapter,
    as_ours,
    peft_model,
    run_peft,
    save,
    train_peft,
    trained,
)
from tests.support.reference import row_logits
from tests.support.runs import (
    Case,
    Outcome,
    call,
    collect_grads,
    loss_and_grads,
    outcome_of,
    train,
)
from tests.training.test_decode import continue_row
from tests.training.test_prompt_targets import targeted

pytestmark = [
    # PEFT warns that the head is tied, and that it writes the head's weight as well.
    pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings=True.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]

VOCAB = 509  # at TP2 one row of the vocabulary is padding
ODD, TIED = {"vocab": VOCAB}, {"vocab": VOCAB, "tied": True}
ALONE = Adapter(("head",))
BY_NAME = Adapter(("lm_head",), rslora=True)
LANGUAGE = Adapter(("attention", "mlp", "head"))
EVERY = Adapter(("attention", "mlp", "head", "merger", "vision_attention", "vision_mlp"))
BESIDE_MERGER = Adapter(("head",), whole_merger=True)
WHOLE, SLICES, COLUMNS = 2**26, 1000, 1  # numbers of logits at once

CASES: dict[str, tuple[Case, Adapter, dict[str, Any], str, int]] = {
    # name: (layout, adapter, sizes of the tiny model, batch, logits at once)
    "1x1x1": (layout(), LANGUAGE, ODD, "mixed", WHOLE),
    "tied": (layout(), LANGUAGE, TIED, "mixed", SLICES),
    "tp2": (layout(tp=2), LANGUAGE, ODD, "mixed", SLICES),
    "tied-tp2": (layout(tp=2), LANGUAGE, TIED, "mixed", WHOLE),
    "pp2": (layout(pp=2), LANGUAGE, ODD, "mixed", SLICES),
    "tied-pp2": (layout(pp=2), LANGUAGE, TIED, "mixed", SLICES),
    "dp2": (layout(dp=2, overlap_grad_reduce=True), LANGUAGE, ODD, "text_on_one_rank", SLICES),
    "tied-dp2": (layout(dp=2), LANGUAGE, TIED, "mixed", WHOLE),
    "every-tp2-pp2": (layout(tp=2, pp=2), EVERY, ODD, "mixed", SLICES),
    "every-tied-tp2-pp2-recompute": (
        layout(tp=2, pp=2, recompute="full", recompute_vision=True),
        EVERY,
        TIED,
        "mixed",
        SLICES,
    ),
    "alone": (layout(), ALONE, ODD, "mixed", WHOLE),
    "alone-recompute": (layout(recompute="full"), ALONE, TIED, "all_text", SLICES),
    "alone-tied-tp2": (layout(tp=2), ALONE, TIED, "mixed", COLUMNS),
    "alone-tied-pp2x2": (layout(pp=2, virtual_stages=2), BY_NAME, TIED, "mixed", SLICES),
    "alone-dp2-overlap": (
        layout(dp=2, overlap_grad_reduce=True, overlap_param_gather=True),
        ALONE,
        ODD,
        "mixed",
        WHOLE,
    ),
    "alone-tp2-dp2-plain-optimizer": (
        layout(tp=2, dp=2, distributed_optimizer=False),
        ALONE,
        TIED,
        "mixed",
        SLICES,
    ),
    "merger-whole-pp2": (layout(pp=2), BESIDE_MERGER, TIED, "mixed", SLICES),
    "experts-ep2": (
        layout(dp=2, ep=2),
        Adapter(("attention", "head")),
        {"vocab": VOCAB, "experts": 8, "layers": 4},
        "mixed",
        SLICES,
    ),
}
QUICK, FULL = ("alone-dp2-overlap",), ("tied", "every-tp2-pp2", "alone-tied-pp2x2")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Callable[..., str]:
    """Return a function for the folder that PEFT writes for an adapter."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def made(adapter: Adapter, sizes: tuple[Any, ...]) -> str:
        return save(peft_model(tiny(**dict(sizes)), adapter), root / f"{len(list(root.iterdir()))}")

    return lambda adapter, sizes: made(adapter, tuple(sizes.items()))


@contextmanager
def at_once(logits: int) -> Iterator[None]:
    with mock.patch.object(log_probs, "LOGITS_AT_ONCE", logits):
        yield


def sliced(path: str, case: Case, rows: list[Row], logits: int) -> Outcome:
    with at_once(logits):
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("name", marked(CASES, QUICK, FULL))
def test_equals_peft(name, pool, tiny, folder, record_property):
    case, adapter, sizes, batch, logits = CASES[name]
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, sizes)))
    rows = make_rows(BATCHES[batch], VOCAB)
    expected = run_peft(peft_model(tiny(**sizes), adapter), rows)
    assert all(f"base_model.model.lm_head.lora_{each}.weight" in expected.grads for each in "AB")
    outcomes = pool.run(sliced, case.world, tiny(**sizes), case, rows, logits)
    errors = compared(outcomes, expected, case)
    worst = max(errors, key=lambda each: errors[each])
    record_property("worst", errors[worst])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e} of {len(errors)} compared"


def batches() -> list[list[Row]]:
    return [make_rows(BATCHES["mixed"], VOCAB, seed) for seed in range(STEPS)]


@pytest.mark.parametrize(
    "name",
    marked(
        ("alone-dp2-overlap", "every-tp2-pp2", "tied", "tied-pp2", "alone-tp2-dp2-plain-optimizer"),
        (),
        ("alone-dp2-overlap", "every-tp2-pp2", "tied"),
    ),
)
def test_weights_after_three_steps(name, pool, tiny, folder, record_property):
    case, adapter, sizes, *_ = CASES[name]
    path = folder(adapter, sizes)
    case = replace(case, lora=dict(adapter.ours, path=path), optim=dict(OPTIM))
    expected_norms, expected = train_peft(peft_model(tiny(**sizes), adapter), batches(), OPTIM)
    _, norms, weights = pool.run(train, case.world, tiny(**sizes), case, batches())[0]
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    assert weights.keys() == expected.keys()
    mean = max(float((weights[n] - expected[n]).abs().mean()) / OPTIM["lr"] for n in weights)
    largest = max(float((weights[n] - expected[n]).abs().max()) / OPTIM["lr"] for n in weights)
    record_property("worst", (norm_error, mean, largest))
    assert norm_error <= NORM_TOLERANCE
    assert mean <= MEAN_TOLERANCE_LR and largest <= MAX_TOLERANCE_LR, (mean, largest)


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


@pytest.mark.parametrize("name", marked(("tied-tp2", "pp2", "1x1x1"), (), ("tied-tp2",)))
def test_several_targets_a_place(name, pool, tiny, folder, record_property):
    case, adapter, sizes, *_ = CASES[name]
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, sizes)))
    rows = targeted(True)
    loss, log_probs, grads = targets_by_peft(peft_model(tiny(**sizes), adapter), rows)
    ask = partial(of_targets, rows=rows)
    actual = pool.run(call, case.world, tiny(**sizes), case, ask)[0]
    worst = [abs(actual[0] / loss - 1)]
    worst += [float((a - b).abs().max()) for a, b in zip(actual[1], log_probs, strict=True)]
    assert actual[2].keys() == grads.keys()
    worst += [
        float((actual[2][name] - expected).norm() / expected.norm())
        for name, expected in grads.items()
    ]
    record_property("worst", max(worst))
    assert max(worst) <= TOLERANCE


def asked(worker: MegatronWorker, rows: list[Row]) -> Any:
    with at_once(SLICES):
        return (
            local_group(worker).likeliest(rows, 5, 0.7).result(),
            generate(worker.stage, rows, 6, (), batch_rows=3),
        )


@pytest.mark.parametrize("name", marked(("tied-tp2", "pp2", "1x1x1"), (), ("tied-tp2",)))
def test_what_is_likeliest_and_what_is_generated(name, pool, tiny, folder, record_property):
    case, adapter, sizes, *_ = CASES[name]
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, sizes)))
    rows, model = asked_rows(), peft_model(tiny(**sizes), adapter).eval()
    ask = partial(asked, rows=rows)
    most_likely, generated = pool.run(call, case.world, tiny(**sizes), case, ask)[0]
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
    assert batch.of_M is None and batch.targets_M is not None
    logits_NV = whole_logits(logits_Nv, VOCAB, worker.grid.tp)
    return log_probs_M, logits_NV.log_softmax(-1).gather(1, batch.targets_M[:, None])[:, 0]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_those_that_targets_are_scored_by(
    precision, pool, tiny, folder, record_property
):
    """The logits are summed in fp32 also for bf16, so that a sample has the log-probs of the
    forward. Measured: 4.8e-7; with the sum in bf16 9.7e-4."""
    case, adapter, sizes, *_ = CASES["tied-tp2"]
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, sizes)))
    case = replace(case, train={"precision": precision, "micro_batch_size": 5})
    ask = partial(both_ways, rows=asked_rows())
    pairs = pool.run(call, 2, tiny(**sizes), case, ask)
    worst = max(float((scored_M - from_logits_M).abs().max()) for scored_M, from_logits_M in pairs)
    record_property("worst", worst)
    assert worst <= 4e-6


def waiting(worker: MegatronWorker, rows: list[Row]) -> tuple[int, int]:
    """Return the number of weights that are still being gathered after a step, and after the
    forward that needs them."""
    worker.forward_backward(rows)
    worker.optim_step(lr=1e-3)
    after_step = len(worker.gather.pending)
    worker.forward_backward(rows)
    return after_step, len(worker.gather.pending)


def test_a_forward_waits_for_the_heads_new_weights(pool, tiny, folder):
    """The head's weights are not part of what runs before the head, and its own layer is not
    called."""
    case, adapter, sizes, *_ = CASES["alone-dp2-overlap"]
    case = replace(case, lora=adapter.ours)
    ask = partial(waiting, rows=make_rows(BATCHES["mixed"], VOCAB)[:2])
    assert pool.run(call, 2, tiny(**sizes), case, ask) == [(1, 0)] * 2


# Mutants.


@contextmanager
def unscaled() -> Iterator[None]:
    right = Adapters.factors

    def wrong(self: Adapters, x: Tensor) -> tuple[Tensor, Tensor]:
        low, up = right(self, x)
        return low / self.scale, up

    with mock.patch.object(Adapters, "factors", wrong):
        yield


@contextmanager
def not_summed_over_tp() -> Iterator[None]:
    right = FactorGradients.reduce

    def wrong(self: FactorGradients, group: Any) -> Any:
        if self.input_NI.shape[1] == ALONE.rank:
            return self.grad_NI, self.grad_VI
        return right(self, group)

    with mock.patch.object(FactorGradients, "reduce", wrong):
        yield


@contextmanager
def only_in_the_first_slice() -> Iterator[None]:
    right = FactorGradients.add

    def wrong(self: FactorGradients, slope_Nv: Tensor, start: int, end: int) -> None:
        if start == 0 or self.input_NI.shape[1] != ALONE.rank:
            right(self, slope_Nv, start, end)

    with mock.patch.object(FactorGradients, "add", wrong):
        yield


@contextmanager
def not_in_the_logits_again() -> Iterator[None]:
    """Compute the logits of the backward pass without the adapter."""
    right = log_probs._Predict.backward

    def wrong(ctx: Any, *grads: Tensor) -> Any:
        with mock.patch.object(log_probs, "logits_of", lambda p, *span: logits_of(p[:1], *span)):
            return right(ctx, *grads)

    logits_of = log_probs.logits_of
    with mock.patch.object(log_probs._Predict, "backward", staticmethod(wrong)):
        yield


@contextmanager
def not_attached() -> Iterator[None]:
    right = Adapters.factors

    def wrong(self: Adapters, x: Tensor) -> tuple[Tensor, Tensor]:
        return right(self, x.detach())

    with mock.patch.object(Adapters, "factors", wrong):
        yield


MUTANTS = {
    "unscaled": unscaled,
    "not summed over TP": not_summed_over_tp,
    "only in the first slice": only_in_the_first_slice,
    "not in the logits again": not_in_the_logits_again,
    "no gradient through A": not_attached,
}


def broken(worker: MegatronWorker, rows: list[Row]) -> dict[str, Outcome]:
    """Return the outcome of each mutant, and at the end that of the code as it is."""
    outcomes = {}
    for name, mutant in {**MUTANTS, "none": nullcontext}.items():
        with mutant(), at_once(SLICES):
            outcomes[name] = outcome_of(worker, rows)
    return outcomes


@pytest.mark.full
def test_parity_notices_mutants(pool, tiny, folder, record_property):
    case, adapter, sizes, batch, _ = CASES["tied-tp2"]
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, sizes)))
    rows = make_rows(BATCHES[batch], VOCAB)
    outcomes = pool.run(call, 2, tiny(**sizes), case, partial(broken, rows=rows))
    expected = run_peft(peft_model(tiny(**sizes), adapter), rows)
    worst = {
        name: max(compared([each[name] for each in outcomes], expected, case).values())
        for name in outcomes[0]
    }
    record_property("worst", worst)
    assert worst.pop("none") <= TOLERANCE
    assert min(worst.values()) > 100 * TOLERANCE, worst
