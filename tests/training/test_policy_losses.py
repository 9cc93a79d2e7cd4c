# .venv/bin/python -m pytest tests/training/test_policy_losses.py
"""Losses that learn from samples, against the formulas of their papers over whole answers on
Hugging Face's model: value, reported means and all gradients, at each kind of layout; and the
divisors of the sums."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.rl.policy_update import importance_weights
from megatron_vlm.rl.train_batch import Aggregate, divisor_of, group_advantages, token_weights
from megatron_vlm.training.losses import Objective, check_divisor
from megatron_vlm.training.token_losses import cispo, gspo, importance_sampling, ppo
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_log_probs, row_logits
from tests.support.runs import Case, collect_grads, my_rows
from tests.support.suites import FULL, quick
from tests.training.test_losses import TOLERANCE, VOCAB, Expected

# The tolerance is that of test_losses.py. Measured worst case: 1.8e-6, gradients at DP2.
MAX_TOKENS = 40  # the limit of an answer, by which Dr. GRPO divides
# A micro-batch has three of eight rows, so that one has two rows of the same sequence number.
LAYOUTS = {
    name: replace(layout(**degrees), train=dict(micro_batch_size=3))
    for name, degrees in {"1x1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {"dp": 2}}.items()
}

Values = dict[str, Tensor]  # values of the tokens of one answer
# A formula takes an answer's tokens, and returns the loss of each and whether the clip decides it.
Formula = Callable[[Tensor, Values], tuple[Tensor, Tensor]]


def reinforced(p: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Return the loss -(p / p_old) A."""
    old = values["old_log_probs"].exp()
    return -(p.exp() / old) * values["advantages"], torch.zeros_like(p)


def clipped(low: float, high: float, by_sequence: bool = False) -> Formula:
    """Return PPO's equation 7: the minimum of r A and clip(r) A, or GSPO's equations 5 and 7, with
    the ratio of whole answers, to the power of 1 / |y|."""

    def loss(p: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        ratio, gain = p.exp() / values["old_log_probs"].exp(), values["advantages"]
        if by_sequence:
            ratio = (p.sum() - values["old_log_probs"].sum()).exp() ** (1 / len(p))
        stops = ((gain > 0) & (ratio > 1 + high)) | ((gain < 0) & (ratio < 1 - low))
        bound = torch.where(gain > 0, 1 + high, 1 - low)
        return -torch.where(stops, bound * gain, ratio * gain), stops

    return loss


def weighted_reinforce(low: float, high: float) -> Formula:
    """Return CISPO's equation 4: sg(clip(r)) A log p."""

    def loss(p: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        ratio = (p.exp() / values["old_log_probs"].exp()).detach()
        weight = torch.clip(ratio, 1 - low, 1 + high)
        return -weight * values["advantages"] * p, weight != ratio

    return loss


@dataclass(frozen=True)
class Algorithm:
    """The package's loss with its options and division, and the formula of an algorithm."""

    ours: dict[str, Any]
    formula: Formula
    aggregate: Aggregate
    truncated: float | None = None  # the limit of the sampler's importance weights


TERMS = dict(kl_coef=0.4, entropy_coef=0.3)
ALGORITHMS = {
    "grpo": Algorithm(dict(loss="ppo", kl_coef=0.04), clipped(0.2, 0.2), "sequences"),
    "dr_grpo": Algorithm(dict(loss="ppo"), clipped(0.2, 0.2), "constant"),
    "dapo": Algorithm(dict(loss="ppo", clip_high=0.28), clipped(0.2, 0.28), "tokens", 1.1),
    "gspo": Algorithm(dict(loss="gspo"), clipped(3e-4, 4e-4, True), "sequences"),
    "gspo, wide, all terms": Algorithm(
        dict(loss="gspo", clip_low=0.05, clip_high=0.02, **TERMS),
        clipped(0.05, 0.02, True),
        "tokens",
        1.1,
    ),
    "cispo": Algorithm(dict(loss="cispo"), weighted_reinforce(1.0, 0.28), "tokens"),
    "cispo, both sides, all terms": Algorithm(
        dict(loss="cispo", clip_low=0.2, clip_high=0.1, **TERMS),
        weighted_reinforce(0.2, 0.1),
        "constant",
        1.1,
    ),
    "rloo": Algorithm(dict(loss="importance_sampling", **TERMS), reinforced, "sequences", 1.1),
}


def picked(row: Row) -> Tensor:
    """Return the places of the supervised tokens."""
    return (row.labels_S[1:] != IGNORE).nonzero()[:, 0] + 1


def sampled(rows: list[Row], log_probs: list[Tensor]) -> list[Row]:
    """Return answers with an advantage each, near the policy's own log-probs, and NaN where nothing
    is supervised. Rows have two sequence numbers by turns: only neighbours have to differ."""
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(len(rows), generator=generator).tolist()
    advantages = group_advantages(rewards, "grpo")
    samples = []
    for place, (row, own_S) in enumerate(zip(rows, log_probs, strict=True)):
        noise = torch.randn(3, len(own_S), generator=generator)
        # Answers also drift as a whole, as far as either clip of GSPO.
        old_S = own_S + 0.25 * noise[0] + 0.1 * (place % 3 - 1)
        values = {
            "advantages": torch.full_like(own_S, advantages[place]),
            "old_log_probs": old_S,
            "ref_log_probs": own_S + 0.5 * noise[1],
            "sampler_log_probs": old_S + 0.2 * noise[2],
        }
        supervised_S = row.labels_S != IGNORE
        spoilt = {name: value.where(supervised_S, torch.nan) for name, value in values.items()}
        samples.append(replace(row, values_S=spoilt))
    return samples


@pytest.fixture(scope="module")
def rows(tiny) -> list[Row]:
    model = load_reference(tiny(vocab=VOCAB, **SHALLOW))
    rows = make_rows(MIXED, VOCAB)
    with torch.no_grad():
        return sampled(rows, [row_log_probs(model, row) for row in rows])


def prepared(algorithm: Algorithm, rows: list[Row]) -> tuple[list[Row], float | None]:
    """Return the samples as a training loop prepares them: rows with weights, and the divisor."""
    lengths = [len(picked(row)) for row in rows]
    weights = token_weights(lengths, algorithm.aggregate)
    weighted_rows = []
    for row, weight in zip(rows, weights, strict=True):
        values = dict(row.values_S)
        names = ("old_log_probs", "sampler_log_probs")
        truncated = importance_weights(*(values[name] for name in names), algorithm.truncated)
        values["advantages"] = values["advantages"] * torch.tensor(truncated)
        weights_S = torch.full(row.ids_S.shape, weight)
        weighted_rows.append(replace(row, values_S=values, loss_weights_S=weights_S))
    return weighted_rows, divisor_of(lengths, algorithm.aggregate, MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(tiny, rows) -> dict[str, Expected]:
    """Return the objectives of the papers over whole answers, by plain PyTorch on Hugging Face's
    model, from one forward of each answer."""
    model = load_reference(tiny(vocab=VOCAB, **SHALLOW))

    named = dict(model.named_parameters())
    all_log_probs = [row_logits(model, r)[picked(r) - 1].float().log_softmax(-1) for r in rows]

    def terms_of(row: Row, all_p: Tensor, algorithm: Algorithm) -> Values:
        """Return the loss of each token with the terms that are added, and the reported values."""
        places = picked(row)
        p = all_p.gather(-1, row.ids_S[places, None])[:, 0]
        values = {name: value[places] for name, value in row.values_S.items()}
        losses, stopped = algorithm.formula(p, values)
        if algorithm.truncated is not None:
            ratio = values["old_log_probs"].exp() / values["sampler_log_probs"].exp()
            losses = losses * torch.clip(ratio, max=algorithm.truncated)
        ratio = (p - values["old_log_probs"]).exp()
        report = {"ratio": ratio, "old_kl": ratio - 1 - ratio.log(), "clip_fraction": stopped}
        if "kl_coef" in algorithm.ours:
            ahead = values["ref_log_probs"] - p
            report["kl"] = ahead.exp() - 1 - ahead
            losses = losses + algorithm.ours["kl_coef"] * report["kl"]
        if "entropy_coef" in algorithm.ours:
            report["entropy"] = -(all_p.exp() * all_p).sum(-1)
            losses = losses - algorithm.ours["entropy_coef"] * report["entropy"]
        return {"loss": losses, **report}

    def compute(algorithm: Algorithm) -> Expected:
        answers = [terms_of(*each, algorithm) for each in zip(rows, all_log_probs, strict=True)]
        losses = [answer.pop("loss") for answer in answers]
        means = {
            key: float(torch.cat([a[key].detach() for a in answers]).double().mean())
            for key in answers[0]
        }
        total = {
            "tokens": lambda: torch.cat(losses).mean(),
            "sequences": lambda: torch.stack([each.mean() for each in losses]).mean(),
            "constant": lambda: torch.stack([each.sum() / MAX_TOKENS for each in losses]).mean(),
        }[algorithm.aggregate]()
        grads = torch.autograd.grad(total, list(named.values()), retain_graph=True)
        return Expected(float(total.detach()), means, dict(zip(named, grads, strict=True)))

    return {name: compute(algorithm) for name, algorithm in ALGORITHMS.items()}


def run_algorithms(path: str, case: Case, rows: list[Row]) -> dict[str, tuple[StepMetrics, dict]]:
    worker = MegatronWorker(case.config(path))
    results = {}
    for name, algorithm in ALGORITHMS.items():
        all_rows, divisor = prepared(algorithm, rows)
        metrics = worker.forward_backward(my_rows(all_rows), divisor=divisor, **algorithm.ours)
        results[name] = metrics, collect_grads(worker)
    return results


def apart(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient, relative to its norm."""
    return max(relative_errors(found, {key: want[key] for key in found}).values())


@pytest.mark.parametrize("name", quick(["tp2"], ["tp2", "pp2", "dp2"]))
def test_equals_the_formula_over_whole_answers(name, pool, tiny, rows, expected, record_property):
    case = LAYOUTS[name]
    outcomes = pool.run(run_algorithms, case.world, tiny(vocab=VOCAB, **SHALLOW), case, rows)
    worst: dict[str, float] = {}
    for algorithm, (metrics, grads) in outcomes[0].items():
        for other in outcomes:  # every rank reports the same
            assert other[algorithm][0] == metrics
        reference = expected[algorithm]
        assert metrics.means.keys() == reference.means.keys() - (
            set() if "clip_fraction" in metrics.means else {"clip_fraction"}
        )
        worst[f"{algorithm}: loss"] = abs(metrics.loss - reference.loss) / abs(reference.loss)
        for key, value in metrics.means.items():
            error = abs(value - reference.means[key]) / max(abs(reference.means[key]), 1e-2)
            worst[f"{algorithm}: {key}"] = error
        worst[f"{algorithm}: gradients"] = apart(grads, reference.grads)
    check_worst(worst, TOLERANCE, record_property)


def test_each_formula_is_put_to_the_test(expected):
    """A clip stops some tokens and not others, and no two algorithms have the same loss."""
    for name, algorithm in ALGORITHMS.items():
        if algorithm.formula is not reinforced:
            assert 0.1 < expected[name].means["clip_fraction"] < 0.9, name
    losses = [expected[name].loss for name in ALGORITHMS]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 100 * TOLERANCE


DIVISORS = (None, 1.0, 7.5, 3000)


Divided = list[tuple[StepMetrics, dict[str, Tensor]]]


def divided(path: str, case: Case, batches: list[list[Row]]) -> list[Divided]:
    """Return for each batch loss and gradients by each divisor. The last result is that of a
    group, which fills up its rows."""
    worker = MegatronWorker(case.config(path))
    group, results = local_group(worker), []
    options: dict[str, Any] = dict(loss="gspo", kl_coef=0.1)
    for rows in batches:
        results.append([])
        for divisor in DIVISORS:
            metrics = worker.forward_backward(my_rows(rows), divisor=divisor, **options)
            results[-1].append((metrics, collect_grads(worker)))
        call = group.forward_backward(batch_of(rows), divisor=DIVISORS[-1], **options)
        results[-1].append((call.result(), collect_grads(worker)))
    return results


@pytest.mark.parametrize("name", quick(["dp2"], ["pp2", "dp2"]))
def test_a_divisor_takes_the_place_of_the_sum_of_weights(name, pool, tiny, rows, record_property):
    rows = rows[:7]  # replicas and micro-batches all differ in their numbers of tokens
    weights = torch.linspace(0.5, 2.0, len(rows)).tolist()
    weighted = [
        replace(row, loss_weights_S=torch.full(row.ids_S.shape, weight))
        for row, weight in zip(rows, weights, strict=True)
    ]
    sums = [
        sum(w * len(picked(row)) for w, row in zip(each, rows, strict=True))
        for each in ([1] * len(rows), weights)
    ]
    case, worst = LAYOUTS[name], 0.0
    path = tiny(vocab=VOCAB, **SHALLOW)
    outcomes = pool.run(divided, case.world, path, case, [rows, weighted])
    for total, ((plain, grads), *others) in zip(sums, outcomes[0], strict=True):
        for divisor, (metrics, scaled) in zip([*DIVISORS[1:], DIVISORS[-1]], others, strict=True):
            factor = total / divisor
            expected = {key: grad * factor for key, grad in grads.items()}
            worst = max(worst, apart(scaled, expected), abs(metrics.loss / plain.loss / factor - 1))
            assert metrics.num_tokens == plain.num_tokens
            assert metrics.means == pytest.approx(plain.means, rel=1e-6)
    record_property("worst", worst)
    assert worst <= TOLERANCE
    first, last = ([[m for m, _ in each] for each in outcomes[rank]] for rank in (0, -1))
    assert first == last


def without_tokens(path: str, case: Case, rows: list[Row]) -> tuple[StepMetrics, Any, float]:
    worker = MegatronWorker(case.config(path))
    unsupervised = [replace(row, labels_S=torch.full_like(row.labels_S, IGNORE)) for row in rows]
    metrics = worker.forward_backward(my_rows(unsupervised), loss="gspo", divisor=5.0)
    largest = max(float(grad.abs().max()) for grad in collect_grads(worker).values())
    return metrics, worker.optim_step(), largest


def test_a_divisor_without_a_token(pool, tiny, rows):
    result = pool.run(without_tokens, 1, tiny(vocab=VOCAB, **SHALLOW), layout(), rows[:2])[0]
    metrics, (norm, _), largest = result
    assert (metrics.loss, metrics.num_tokens, norm, largest) == (0, 0, 0, 0)


def with_routers(path: str, cases: list[Case], rows: list[Row]) -> list[list[tuple]]:
    """Return by each divisor the gradients without and with the losses of routers, and these
    losses."""
    plain, routed = (MegatronWorker(case.config(path)) for case in cases)
    results = []
    for divisor in (None, 2.0, 500.0):
        metrics = [w.forward_backward(my_rows(rows), divisor=divisor) for w in (plain, routed)]
        grads = [collect_grads(w) for w in (plain, routed)]
        own = {name: metrics[1].means[name] for name in ("balance_loss", "z_loss")}
        results.append((grads, own, [each.loss for each in metrics]))
    return results


@FULL
def test_losses_of_routers_are_means_of_their_own(pool, tiny):
    rows = make_rows(MIXED)
    cases = [layout(dp=2), layout(dp=2, router_balance_loss=2.0, router_z_loss=0.5)]
    outcome = pool.run(with_routers, 2, tiny(**EXPERTS | SHALLOW), cases, rows)[0]
    (plain, routed), own, losses = outcome[0]
    added = {key: routed[key] - plain[key] for key in plain}
    assert losses[0] == pytest.approx(losses[1])
    for (plain, routed), values, _ in outcome[1:]:
        assert values == own
        for key, expected in added.items():
            scale = float(expected.norm()) + float(plain[key].norm())
            assert float((routed[key] - plain[key] - expected).norm()) <= TOLERANCE * scale, key


@pytest.mark.parametrize("divisor", [0, -1.0, torch.inf, torch.nan, "3"])
def test_divisors_that_are_refused(divisor):
    with raises(ConfigError, key="divisor") as caught:
        check_divisor(divisor)
    assert caught.value.found is divisor


def refuse_a_divisor(path: str, case: Case) -> None:
    worker = MegatronWorker(case.config(path))
    for forward_backward in (worker.forward_backward, local_group(worker).forward_backward):
        with raises(ConfigError, key="divisor", found=-3):
            forward_backward([], divisor=-3)


def test_workers_and_groups_refuse_a_divisor(pool, tiny):
    pool.run(refuse_a_divisor, 1, tiny(**SHALLOW), layout())


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize(
    ("name", "value"), [("clip_low", 0), ("clip_low", 1.01), ("clip_high", 0), ("clip_high", -1)]
)
def test_clips_that_are_refused(loss, name, value):
    with raises(ConfigError, place=f"loss {loss}", key=name, found=value):
        Objective.create(loss, {"clip_low": 0.2, "clip_high": 0.2, name: value})


@pytest.mark.parametrize("loss", [importance_sampling, ppo, gspo, cispo])
def test_the_host_waits_for_nothing(loss):
    """A meta tensor has no value, so that reading one would raise."""
    values = [torch.zeros(9, device="meta") for _ in range(4 if loss is gspo else 3)]
    losses, report = loss(*values)
    assert losses.shape == (9,) and all(each.shape == (9,) for each in report.values())
    assert loss(*[torch.zeros(0)] * len(values))[0].shape == (0,)


def test_sequences_of_one_token_and_alike_by_turns():
    log_probs_N = torch.tensor([0.1, 0.3, -0.2, 0.4, 0.5])
    numbers_N = torch.tensor([4.0, 4.0, 9.0, 4.0, 9.0])
    losses_N, _ = gspo(log_probs_N, torch.ones(5), torch.zeros(5), numbers_N, clip_high=9.0)
    expected_N = -torch.tensor([0.2, 0.2, -0.2, 0.4, 0.5]).exp()
    assert torch.allclose(losses_N, expected_N, rtol=1e-6)
