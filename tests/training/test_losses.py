# .venv/bin/python -m pytest tests/training/test_losses.py
"""Losses against a plain PyTorch computation on Hugging Face's model: value, reported means and all
gradients, at each kind of layout. Also the refusals. Those that learn from samples are in
test_policy_losses.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller.torchrun import local_group
from megatron_vlm.data.batches.collate import split_micro_batches
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of, rows_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.row import COLUMNS, IGNORE, Row, RowColumn
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.qwen.model import mrope_positions
from megatron_vlm.family.spec import Tokens
from megatron_vlm.training.data_feed import share_batch
from megatron_vlm.training.losses import Objective, register
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.token_losses import generalized_jsd
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, RowSpec, make_rows, token_ids
from tests.support.comparison import check_worst, relative_errors
from tests.support.error_fields import raises
from tests.support.reference import grads_of, load_reference, row_log_probs, row_logits
from tests.support.runs import Case, call, collect_grads, my_rows
from tests.support.suites import quick

TOKENS = Tokens(512, token_ids().image, token_ids().video, 2, mrope_positions)
VOCAB = 509  # at TP2 one row of the vocabulary is padding
SMALL = SHALLOW | dict(vocab=VOCAB)
# Relative error in fp32 on the CPU, as in test_parity.py. Measured worst case: 1.9e-6, a gradient
# at TP2.
TOLERANCE = 5e-6


@register
def weighted(log_probs_N: Tensor, weights_N: Tensor, *, power: float = 1.0) -> tuple:
    """Compute a user's own loss."""
    weights_N = weights_N.abs() ** power
    return -weights_N * log_probs_N, {"weight": weights_N}


@dataclass(frozen=True)
class Plain:
    """A loss written out, from the tokens' log-probs, entropies and values to the loss and its
    report."""

    ours: dict[str, Any]
    theirs: Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def plain_cross_entropy(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
    return -log_probs, {}


def plain_weighted(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
    weights = values["weights"] ** 2
    return -weights * log_probs, {"weight": weights}


def plain_sum_of_weighted(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
    return values["weights"] * -log_probs, {}


def plain_dro(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
    old = values["old_log_probs"]
    loss = -(log_probs * values["advantages"] - 0.7 / 2 * (log_probs - old) ** 2)
    ratio = torch.exp(log_probs - old)
    return loss, {"ratio": ratio, "old_kl": ratio - 1 - torch.log(ratio)}


def with_terms(loss_of: Callable, kl_coef: float = 0.0, entropy_coef: float | None = None):
    """Add the k3 estimate of the KL to the reference, and subtract the entropy."""

    def total(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
        loss, report = loss_of(log_probs, entropy, values)
        ratio = torch.exp(values["ref_log_probs"] - log_probs)
        kl = ratio - 1 - (values["ref_log_probs"] - log_probs)
        report = {**report, "kl": kl} | ({"entropy": entropy} if entropy_coef is not None else {})
        return loss + kl_coef * kl - (entropy_coef or 0.0) * entropy, report

    return total


def plain_distill(beta: float, temperature: float = 1.0, ce_coef: float = 0.0):
    """Compare the events of two distributions, the J given tokens and all others, by the formulas
    of GKD's paper."""

    def loss_of(log_probs: Tensor, entropy: Tensor, values: dict[str, Tensor]):
        ids, teacher = values["teacher_ids"].long(), values["teacher_log_probs"].double().exp()
        probs = (values["logits"].double() / temperature).softmax(-1)
        others = probs.scatter(1, ids, 0).sum(1, keepdim=True)
        student = torch.cat([probs.gather(1, ids), others], dim=1)

        def kl(first: Tensor, second: Tensor) -> Tensor:
            return (first * (first / second).log()).sum(1)

        mixture = beta * teacher + (1 - beta) * student
        jsd = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
        divergence = {0.0: kl(teacher, student), 1.0: kl(student, teacher)}.get(beta, jsd)
        report = {"divergence": divergence, "cross_entropy": -log_probs}
        return divergence - ce_coef * log_probs, report

    return loss_of


LOSSES: dict[str, Plain] = {
    "cross_entropy": Plain({}, plain_cross_entropy),
    "terms reported only": Plain(
        dict(kl_coef=0.0, entropy_coef=0.0), with_terms(plain_cross_entropy, 0.0, 0.0)
    ),
    "entropy alone": Plain(
        dict(loss="weighted", power=2.0, kl_coef=0, entropy_coef=5.0),
        with_terms(plain_weighted, 0.0, 5.0),
    ),
    "weights of any sign": Plain({"loss": "weighted_cross_entropy"}, plain_sum_of_weighted),
    "dro": Plain({"loss": "dro", "beta": 0.7}, plain_dro),
    "forward KL": Plain(dict(loss="distill"), plain_distill(0.0)),
    "reverse KL": Plain(dict(loss="distill", beta=1.0), plain_distill(1.0)),
    "JSD, all terms": Plain(
        dict(loss="distill", beta=0.3, temperature=1.7, ce_coef=0.2, kl_coef=0.4),
        with_terms(plain_distill(0.3, 1.7, 0.2), 0.4),
    ),
    "a user's own": Plain(dict(loss="weighted", power=2.0), plain_weighted),
}
LAYOUTS = {"tp2": layout(tp=2), "pp2": layout(pp=2), "dp2": layout(dp=2)}


@dataclass(frozen=True)
class Expected:
    loss: float
    means: dict[str, float]
    grads: dict[str, Tensor]


def with_teacher(row: Row, logits_SV: Tensor, generator: torch.Generator) -> Row:
    """Return the row with the four likeliest tokens of a teacher that is near the model."""
    picked = (row.labels_S[1:] != IGNORE).nonzero()[:, 0]
    noise = torch.randn(len(picked), logits_SV.shape[1], generator=generator)
    log_probs = (logits_SV[picked].float() + 1.5 * noise).log_softmax(-1)
    likeliest = log_probs.topk(4)
    others = log_probs.scatter(1, likeliest.indices, -torch.inf).logsumexp(1, keepdim=True)
    return replace(
        row,
        teacher_ids_NJ=likeliest.indices.int(),
        teacher_log_probs_NR=torch.cat([likeliest.values, others], dim=1),
    )


def with_values(rows: list[Row], log_probs: list[Tensor]) -> list[Row]:
    """Return rows with the values that losses read, near the policy's own log-probs, with some
    ratios beyond any clip. Positions without supervision hold NaN, which would spoil every result.
    """
    generator = torch.Generator().manual_seed(5)

    def values(row: Row, own_S: Tensor) -> dict[str, Tensor]:
        def noise(scale: float) -> Tensor:
            return scale * torch.randn(len(own_S), generator=generator)

        drawn = {
            "advantages": noise(1.0),
            "old_log_probs": own_S + noise(0.3),
            "ref_log_probs": own_S + noise(0.5),
            "weights": noise(1.0),
        }
        return {k: v.where(row.labels_S != IGNORE, torch.nan) for k, v in drawn.items()}

    return [
        replace(row, values_S=values(row, own_S))
        for row, own_S in zip(rows, log_probs, strict=True)
    ]


@pytest.fixture(scope="module")
def rl_rows(tiny) -> list[Row]:
    model = load_reference(tiny(**SMALL))
    rows = make_rows(MIXED, VOCAB)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        valued = with_values(rows, [row_log_probs(model, row) for row in rows])
        return [with_teacher(row, row_logits(model, row), generator) for row in valued]


@pytest.fixture(scope="module")
def expected(tiny, rl_rows) -> dict[str, Expected]:
    """Return what each loss is, from one forward of each row."""
    model = load_reference(tiny(**SMALL))
    count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rl_rows)
    named = dict(model.named_parameters())
    sums: dict[str, dict[str, float]] = {name: {} for name in LOSSES}
    grads = {loss: {n: torch.zeros_like(p) for n, p in named.items()} for loss in LOSSES}
    for row in rl_rows:
        picked = (row.labels_S[1:] != IGNORE).nonzero()[:, 0]
        logits = row_logits(model, row)[picked].float()
        all_log_probs = logits.log_softmax(-1)
        log_probs = all_log_probs.gather(-1, row.ids_S[1 + picked, None])[:, 0]
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        values = {key: value[1 + picked] for key, value in row.values_S.items()}
        assert row.teacher_ids_NJ is not None and row.teacher_log_probs_NR is not None
        values |= {"logits": logits, "teacher_ids": row.teacher_ids_NJ}
        values["teacher_log_probs"] = row.teacher_log_probs_NR
        for name, plain in LOSSES.items():
            loss, report = plain.theirs(log_probs, entropy, values)
            backward = torch.autograd.grad(
                loss.sum() / count, list(named.values()), retain_graph=True, allow_unused=True
            )
            for total, grad in zip(grads[name].values(), backward, strict=True):
                total += 0 if grad is None else grad
            for key, value in {"loss": loss, **report}.items():
                mean = float(value.detach().double().sum()) / count
                sums[name][key] = sums[name].get(key, 0.0) + mean
    return {name: Expected(sums[name].pop("loss"), sums[name], grads[name]) for name in LOSSES}


def run_losses(path: str, case: Case, rows: list[Row]) -> dict[str, tuple[StepMetrics, dict]]:
    worker = MegatronWorker(case.config(path))
    results = {}
    for name, plain in LOSSES.items():
        metrics = worker.forward_backward(my_rows(rows), True, **plain.ours)
        results[name] = metrics, collect_grads(worker)
    return results


@pytest.mark.parametrize("name", quick(["tp2"], ["tp2", "pp2", "dp2"]))
def test_equals_plain_pytorch(name, pool, tiny, rl_rows, expected, record_property):
    case = LAYOUTS[name]
    outcomes = pool.run(run_losses, case.world, tiny(**SMALL), case, rl_rows)
    worst: dict[str, float] = {}
    for loss, (metrics, grads) in outcomes[0].items():
        for other in outcomes:  # every rank reports the same
            assert other[loss][0].loss == metrics.loss and other[loss][0].means == metrics.means
        reference = expected[loss]
        assert metrics.means.keys() == reference.means.keys()
        errors = {"loss": abs(metrics.loss - reference.loss) / abs(reference.loss)}
        for key, value in reference.means.items():
            errors[key] = abs(metrics.means[key] - value) / max(abs(value), 1e-2)
        errors |= relative_errors(grads, reference.grads)
        worst |= {f"{loss}: {key}": error for key, error in errors.items()}
    check_worst(worst, TOLERANCE, record_property)


def by_other_ways(worker: MegatronWorker, rows: list[Row]) -> list[float]:
    """Return the losses of rows, of a batch that went through bytes and of micro-batches that one
    rank has and shares; the ratio of rows whose log-probs were given as the reference; the loss of
    the rows again; and the losses of distillation of the first three."""
    ppo: dict[str, Any] = dict(loss="ppo", kl_coef=0.1)
    distill: dict[str, Any] = dict(loss="distill", beta=0.5)
    batch = TensorBatch.from_bytes(batch_of(rows).to_bytes())
    names = ("old_log_probs", "unread", "advantages", "ref_log_probs")
    shared = None
    if worker.grid.leads:
        placed = [
            replace(row, values_S={**row.values_S, "unread": torch.zeros(len(row.ids_S))})
            for row in rows
        ]
        shared = split_micro_batches(placed, 3, worker.source.sizes.tokens, names), None
    micro_batches, _ = share_batch(shared, worker.grid, worker.platform.device)
    scored = [
        replace(row, values_S={**row.values_S, "old_log_probs": log_probs_S})
        for row, log_probs_S in zip(rows, worker.forward(rows), strict=True)
    ]
    return [
        worker.forward_backward(rows, **ppo).loss,
        worker.forward_backward(batch, **ppo).loss,
        worker.forward_backward(micro_batches, **ppo).loss,
        worker.forward_backward(scored, loss="importance_sampling").means["ratio"],
        worker.forward_backward([*rows, rows[2]][:8], **ppo).loss,
        *(worker.forward_backward(each, **distill).loss for each in (rows, batch, micro_batches)),
    ]


def margin(log_probs_N: Tensor, margins_N: Tensor) -> tuple:
    """Compute a loss that reads a column which no file of the package names."""
    return -margins_N * log_probs_N, {}


def train_with_margins(worker: MegatronWorker, rows: list[Row]) -> tuple[list[Tensor], list[float]]:
    """Return the log-probs of rows, and the losses of steps with them: of the rows, of a batch that
    went through bytes, of micro-batches that one rank has and shares, and of a group."""
    COLUMNS["margins"] = RowColumn("target", fill=0.25)  # all that the column needs
    try:
        batch = TensorBatch.from_bytes(batch_of(rows).to_bytes())
        shared = None
        if worker.grid.leads:
            shared = split_micro_batches(rows, 3, worker.source.sizes.tokens, ("margins",)), None
        micro_batches, _ = share_batch(shared, worker.grid, worker.platform.device)
        log_probs, losses = worker.forward(rows), []
        for way in (rows, batch, micro_batches):
            losses.append(worker.forward_backward(way, loss=margin).loss)
            worker.optim_step()
        metrics = local_group(worker).forward_backward(batch, loss=margin).result()
        return log_probs, [*losses, metrics.loss]
    finally:
        del COLUMNS["margins"]


def call_with_rows(path: str, case: Case, action: Callable, rows: list[Row]) -> Any:
    return action(MegatronWorker(case.config(path)), rows)


def test_a_column_that_is_added_in_one_line_is_trained_with(pool, tiny):
    """Every third row lacks it, and gets what the line says."""
    rows = [
        replace(
            row, values_S={"margins": torch.linspace(0.5, 2.0, len(row.ids_S))} if n % 3 else {}
        )
        for n, row in enumerate(make_rows(MIXED, VOCAB))
    ]
    alone, *ranks = (
        found
        for case in (layout(), layout(tp=2, pp=2))
        for found in pool.run(
            call_with_rows, case.world, tiny(**SMALL), case, train_with_margins, rows
        )
    )
    total, count = 0.0, 0
    for row, log_probs_S in zip(rows, alone[0], strict=True):
        is_target_S = row.labels_S != IGNORE
        is_target_S[0] = False
        margins_S = row.values_S.get("margins", torch.full(row.ids_S.shape, 0.25))
        total -= float((margins_S * log_probs_S)[is_target_S].sum())
        count += int(is_target_S.sum())
    assert alone[1][0] == pytest.approx(total / count, rel=1e-5)
    assert alone[1] == sorted(alone[1], reverse=True)  # it learns
    assert all(losses == pytest.approx(alone[1], rel=1e-4) for _, losses in ranks)


def test_values_go_every_way_that_rows_go(pool, tiny, rl_rows):
    answers = pool.run(call_with_rows, 2, tiny(**SMALL), layout(pp=2), by_other_ways, rl_rows)
    assert answers[0] == answers[1]
    rows, batch, micro_batches, ratio, again, *distilled = answers[0]
    assert rows == batch == again
    assert micro_batches == pytest.approx(rows, rel=1e-6)  # the micro-batches are cut differently
    assert distilled[0] == distilled[1] == pytest.approx(distilled[2], rel=1e-6)
    assert ratio == pytest.approx(1, abs=1e-6)  # `forward` gave the old log-probs


def with_weights(rows: list[Row]) -> list[Row]:
    """Return rows of which half have weights. At DP2 the replicas have different sums, and one
    micro-batch has no weights. Positions without supervision hold NaN, which would spoil every
    result."""
    generator = torch.Generator().manual_seed(8)

    def weights(row: Row) -> Tensor:
        drawn_S = 4 * torch.rand(len(row.ids_S), generator=generator) + 0.01
        return drawn_S.where(row.labels_S != IGNORE, torch.nan)

    return [
        replace(row, loss_weights_S=weights(row) if place in (0, 1, 2, 7) else None)
        for place, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def by_weight(tiny) -> tuple[list[Row], Expected]:
    """Return rows with weights, and plain PyTorch's sum of weighted losses over the sum of
    weights."""
    model = load_reference(tiny(**SMALL))
    rows = with_weights(make_rows(MIXED, VOCAB))
    losses, weights = [], []
    for row in rows:
        picked = (row.labels_S[1:] != IGNORE).nonzero()[:, 0]
        log_probs = row_logits(model, row)[picked].float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, row.ids_S[1 + picked, None])[:, 0])
        weights_S = row.loss_weights_S
        weights.append(torch.ones(len(picked)) if weights_S is None else weights_S[1 + picked])
    loss = (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()
    loss.backward()
    return rows, Expected(float(loss.detach()), {}, grads_of(model.named_parameters()))


def run_weighted(worker: MegatronWorker, rows: list[Row]) -> dict[str, Any]:
    """Run rows with weights, the same rows through bytes and shared by one rank, and rows whose
    weights are all alike."""
    local_rows = my_rows(rows)
    metrics = worker.forward_backward(local_rows)
    results: dict[str, Any] = {"metrics": metrics, "grads": collect_grads(worker)}
    batch = TensorBatch.from_bytes(batch_of(local_rows).to_bytes())
    shared = None
    if worker.grid.leads:
        shared = split_micro_batches(local_rows, 1, worker.source.sizes.tokens), None
    micro_batches, _ = share_batch(shared, worker.grid, worker.platform.device)
    results["ways"] = [worker.forward_backward(way).loss for way in (batch, micro_batches)]
    for name, value in (("alike", 2.5), ("plain", None)):
        alike = [
            replace(row, loss_weights_S=value and torch.full(row.ids_S.shape, value))
            for row in local_rows
        ]
        results[name] = worker.forward_backward(alike).loss, collect_grads(worker)
    return results


@pytest.mark.parametrize("name", quick(["dp2"], ["pp2", "dp2"]))
def test_weights_of_tokens_equal_plain_pytorch(name, pool, tiny, by_weight, record_property):
    rows, expected = by_weight
    case = LAYOUTS[name]
    outcomes = pool.run(call_with_rows, case.world, tiny(**SMALL), case, run_weighted, rows)
    results = outcomes[0]
    assert {outcome["metrics"].loss for outcome in outcomes} == {results["metrics"].loss}
    errors = {"loss": abs(results["metrics"].loss - expected.loss) / expected.loss}
    errors |= relative_errors(results["grads"], expected.grads)
    check_worst(errors, TOLERANCE, record_property)
    assert results["ways"] == pytest.approx([results["metrics"].loss] * 2, rel=1e-6)
    alike, plain = results["alike"], results["plain"]
    assert alike[0] == pytest.approx(plain[0], rel=1e-6)
    assert abs(plain[0] - expected.loss) > 100 * TOLERANCE  # the weights matter
    for key, grad in plain[1].items():
        assert torch.allclose(alike[1][key], grad, rtol=1e-5, atol=1e-7), key


def test_weights_stand_under_their_own_token():
    row = Row(
        torch.tensor([5, 6, 7]),
        torch.tensor([IGNORE, IGNORE, 7]),
        loss_weights_S=torch.tensor([torch.nan, 0, 0.5]),
    )
    plain = Row(torch.tensor([5, 6]), torch.tensor([5, 6]))
    batch = split_micro_batches([plain, row], 2, TOKENS)[0]
    assert batch.columns["loss_weights"].tolist() == [1, 0.5]
    assert batch.weight == 1.5 and batch.num_supervised == 2
    unweighted = split_micro_batches([plain, plain], 2, TOKENS)[0]
    assert not unweighted.columns and unweighted.weight == 2


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_weights_that_are_refused(value):
    row = Row(torch.tensor([5, 6]), torch.tensor([5, 6]))
    wrong = replace(row, loss_weights_S=torch.tensor([1, value]))
    with pytest.raises(DataError) as caught:
        split_micro_batches([row, wrong], 2, TOKENS)
    error = caught.value
    assert (error.place, error.key) == ("row 1", "loss_weights[1]")
    assert str(error.found) == str(value)  # NaN equals nothing
    with raises(DataError, place="row 0", key="loss_weights", problem_has="(3,)") as caught:
        split_micro_batches([replace(row, loss_weights_S=torch.ones(3))], 2, TOKENS)


def test_values_stand_under_their_own_token():
    row = Row(
        torch.tensor([5, 6, 7]),
        torch.tensor([IGNORE, 6, 7]),
        values_S={"a": torch.tensor([torch.nan, 1, 2]), "b": torch.tensor([3, 4, 5]).bfloat16()},
    )
    # This row supervises nothing.
    unsupervised = Row(torch.tensor([5, 6]), torch.tensor([5, IGNORE]))
    batch = split_micro_batches([unsupervised, row], 2, TOKENS, ("b", "a"))[0]
    assert batch.value_names == ("b", "a") and batch.columns["b"].dtype == torch.float32
    values = StageInput(batch, batch.tokens_BS5, columns=batch.columns).values_M(("a", "b"))
    assert values["a"].tolist() == [1, 2] and values["b"].tolist() == [4, 5]
    assert not split_micro_batches([row], 1, TOKENS)[0].columns  # no loss reads them


def test_rows_and_batches_of_rl():
    ids = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    batch = TensorBatch(
        {
            "ids": TensorList(ids),
            "response_mask": TensorList([torch.tensor([0, 1, 0]), torch.tensor([0, 1])]),
            "advantages": TensorList([torch.ones(3), torch.empty(0)]),
            "rewards": torch.zeros(2),  # a field of the controller
        }
    )
    first, second = rows_of(batch)
    assert first.labels_S.tolist() == [IGNORE, 6, IGNORE]
    assert second.labels_S.tolist() == [IGNORE, 9]
    assert list(first.values_S) == ["advantages"] and not second.values_S
    back = batch_of([first, second])
    assert back["advantages"] == batch["advantages"] and "rewards" not in back
    with raises(DataError, place="row 1", key="response_mask", problem_has="(3,)") as caught:
        rows_of(batch.with_fields(response_mask=torch.ones(2, 3)))
    assert "(2,)" in caught.value.problem  # the shape of ids
    with raises(DataError, key="labels", problem_has="response_mask"):
        rows_of(batch.without("response_mask"))
    with raises(DataError, place="values_S", key="labels"):
        batch_of([replace(first, values_S={"labels": torch.ones(3)})])


@pytest.mark.parametrize(
    ("values", "key", "parts"),
    [
        ({}, "advantages", ("missing", "2 tokens")),
        ({"advantages": torch.ones(3)}, "advantages", ("(3,)", "2 tokens")),
        ({"advantages": torch.tensor([0, torch.nan])}, "advantages[1]", ("=nan",)),
    ],
)
def test_rows_that_a_loss_cannot_take(values, key, parts):
    good = Row(torch.tensor([5, 6]), torch.tensor([5, 6]), values_S={"advantages": torch.ones(2)})
    with raises(DataError, place="row 1", key=key) as caught:
        split_micro_batches([good, replace(good, values_S=values)], 2, TOKENS, ("advantages",))
    assert all(part in str(caught.value) for part in parts)


TAUGHT = Row(
    torch.tensor([5, 6, 7]),
    torch.tensor([IGNORE, IGNORE, 7]),
    teacher_ids_NJ=torch.tensor([[7, 9]]),
    teacher_log_probs_NR=torch.tensor([[0.5, 0.3, 0.2]]).log(),
)


def events(*shares: float) -> dict[str, Tensor]:
    return {"teacher_log_probs_NR": torch.tensor([shares]).log()}


@pytest.mark.parametrize(
    ("fields", "key", "part"),
    [
        (
            {"teacher_ids_NJ": torch.tensor([[7, 9], [8, 9]])},
            "teacher_ids",
            "(2, 2) and (1, 3), and the row has 1",
        ),
        ({"teacher_log_probs_NR": None}, "teacher_ids", "(1, 2) and ()"),
        (events(0.5, 0.5), "teacher_ids", "(1, 2) and (1, 2)"),
        ({"teacher_ids_NJ": torch.tensor([[7, 512]])}, "teacher_ids[0,1]", "data.add_tokens"),
        ({"teacher_ids_NJ": torch.tensor([[7, 7]])}, "teacher_ids", "twice"),
        (events(0.5, 0.3, 0.3), "teacher_log_probs[0]", "sum is 1.1"),
        (events(torch.nan, 0.3, 0.3), "teacher_log_probs[0]", "sum is nan"),
    ],
)
def test_teachers_that_are_refused(fields, key, part):
    with raises(DataError, place="row 1", key=key) as caught:
        split_micro_batches([TAUGHT, replace(TAUGHT, **fields)], 2, TOKENS)
    assert part in str(caught.value)


def test_rows_of_a_batch_have_teachers_of_one_width():
    wider = replace(
        TAUGHT,
        teacher_ids_NJ=torch.tensor([[7, 9, 1]]),
        teacher_log_probs_NR=torch.full((1, 4), 0.25).log(),
    )
    untaught = replace(TAUGHT, teacher_ids_NJ=None, teacher_log_probs_NR=None)
    for other in (wider, untaught):
        with raises(DataError, key="teacher_ids"):
            split_micro_batches([TAUGHT, other], 2, TOKENS)
    # A row without supervised tokens needs no teacher.
    prompt = replace(untaught, labels_S=torch.full((3,), IGNORE))
    batch = split_micro_batches([prompt, TAUGHT], 2, TOKENS)[0]
    assert batch.columns["teacher_ids"].tolist() == [[7, 9]]
    objective = Objective.create("distill", {})
    objective.check_batches([batch])
    with raises(DataError, place="micro-batch 1", key="teacher_ids"):
        objective.check_batches([batch, split_micro_batches([untaught], 1, TOKENS)[0]])


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("pqo", {}, dict(key="loss", found="pqo", remedy_has="'ppo'")),
        ("ppo", {"clip_hihg": 0.1}, dict(key="clip_hihg", remedy_has="'clip_high'")),
        ("cross_entropy", {"clip_low": 0.1}, dict(place="loss cross_entropy", key="clip_low")),
        ("ppo", {"kl_coef": float("inf")}, dict(place="loss ppo", key="kl_coef", found=math.inf)),
        ("ppo", {"kl_coef": "1"}, dict(place="loss ppo", key="kl_coef", found="1")),
        ("dro", {"beta": -0.1}, dict(place="loss dro", key="beta", found=-0.1)),
        ("distill", {"beta": 1.5}, dict(place="loss distill", key="beta", found=1.5)),
        ("distill", {"ce_coef": -1.0}, dict(place="loss distill", key="ce_coef", found=-1.0)),
        ("distill", {"temperature": 0}, dict(place="loss distill", key="temperature", found=0)),
        ("distill", {"entropy_coef": 1}, dict(place="loss distill", key="entropy_coef")),
        ("ppo", {"temperature": 2.0}, dict(place="loss ppo", key="temperature")),
    ],
)
def test_losses_that_are_refused(name, options, fields):
    with raises(ConfigError, **fields):
        Objective.create(name, options)


def test_what_a_loss_reads_and_reports():
    ppo = Objective.create("ppo", {"kl_coef": 0.0})
    assert ppo.value_names == ("advantages", "old_log_probs", "ref_log_probs")
    assert ppo.metrics == ("clip_fraction", "ratio", "old_kl", "kl")
    plain = Objective.create("cross_entropy", {})
    assert plain.value_names == plain.metrics == () and plain.entropy_coef is None


def made_micro_batches(worker: MegatronWorker) -> None:
    rows = make_rows((RowSpec(5), RowSpec(9)))
    worker.forward_backward(split_micro_batches(rows, 1, worker.source.sizes.tokens), loss="ppo")


def test_micro_batches_without_values_are_refused(pool, tiny):
    with pytest.raises(RuntimeError, match="micro-batch 0: advantages "):
        pool.run(call, 1, tiny(), layout(), made_micro_batches)


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_an_equal_teacher_teaches_exactly_nothing(beta):
    logits_NR = torch.randn(64, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    student_NR = logits_NR.log_softmax(-1)
    divergence_N = generalized_jsd(student_NR, student_NR.detach(), beta)
    divergence_N.sum().backward()
    assert not divergence_N.any() and not logits_NR.grad.any()
