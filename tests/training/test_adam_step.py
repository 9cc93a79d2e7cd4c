# .venv/bin/python -m pytest tests/training/test_adam_step.py
"""Tests of steps with settings of their own for AdamW. They give the weights of torch.optim.AdamW
on Hugging Face's model with the same settings. A step without gradients happens only on request."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.gather_weights import gather_tensors
from megatron_vlm.training.optimizer_step import AdamStep
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, my_rows, of_interest
from tests.support.suites import quick
from tests.training.test_steps import NORM_TOLERANCE, check_apart

# The entries are (learning rate, settings, whether the step has gradients). The sums of these
# losses have norms of about 100 to 200, so that some of these limits clip and some do not.
STEPS: list[tuple[float, AdamStep, bool]] = [
    (1e-3, AdamStep(0.9, 0.95, 1e-6, 0.0, 0.5), True),
    (5e-4, AdamStep(0.8, 0.99, 1e-4, 0.3, 0.0), True),
    (2e-3, AdamStep(0.95, 0.9, 1e-3, 0.1, 0.0, without_gradients=True), False),
    (1e-3, AdamStep(0.5, 0.999, 1e-5, 0.0, 1e6), True),
    (1e-3, AdamStep(0.9, 0.98, 1e-5, 0.2, 3.0), True),
]
LR = 1e-3  # the unit of differences
# The settings of the last step, which has none of its own.
CONFIGURED = dict(lr=LR, beta1=0.7, beta2=0.97, eps=1e-5, weight_decay=0.05, clip_grad=2.0)


def batch(step: int) -> list:
    return make_rows(MIXED, seed=step)


def reference_steps(path: str) -> tuple[list[float], dict[str, Tensor]]:
    model = load_reference(path)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() == 1]},
    ]
    optimizer = torch.optim.AdamW(groups)
    norms = []
    last = AdamStep(*list(CONFIGURED.values())[1:])
    for number, (lr, adam, gradients) in enumerate([*STEPS, (LR, last, True)]):
        for param in params:
            param.grad = torch.zeros_like(param)
        for row in batch(number) if gradients else ():
            (-row_log_probs(model, row).sum()).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in params])))
        if adam.clip_grad:
            torch.nn.utils.clip_grad_norm_(params, adam.clip_grad)
        for group, decay in zip(optimizer.param_groups, (adam.weight_decay, 0.0), strict=True):
            group |= {"lr": lr, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
            group["weight_decay"] = decay
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def our_steps(path: str, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    group = local_group(worker := MegatronWorker(case.config(path)))
    norms = []
    for number, (lr, adam, gradients) in enumerate(STEPS):
        if gradients:
            group.forward_backward(batch(number), divisor=1).result()
        norms.append(group.optim_step(lr, adam).result()[0])
    worker.forward_backward(my_rows(batch(len(STEPS))), divisor=1)
    norms.append(worker.optim_step()[0] if worker.lr == LR else torch.nan)
    named = gather_tensors(worker.held, worker.table, worker.grid, of=of_interest(worker))
    return norms, {name: value.clone() for name, value in named if value is not None}


@pytest.fixture(scope="module")
def reference(tiny):
    return reference_steps(tiny(**SIZES))


# Tolerance for the mean of a tensor's weights, in units of lr. The measured worst case is 2.1e-4.
MEAN_TOLERANCE_LR = 1e-3
SIZES = SHALLOW | {"layers": 4}  # two stages on each of two ranks
CASES = {
    "tp2-pp2": layout(tp=2, pp=2),
    "dp2": layout(dp=2),
    "pp2x2-dp2-overlap": layout(
        pp=2, dp=2, virtual_stages=2, overlap_grad_reduce=True, overlap_param_gather=True
    ),
}


@pytest.mark.parametrize("name", quick(["dp2"], CASES))
def test_each_step_has_settings_of_its_own(name, pool, tiny, reference, record_property):
    case = replace(CASES[name], optim=CONFIGURED)
    expected_norms, expected = reference
    norms, weights = pool.run(our_steps, case.world, tiny(**SIZES), case)[0]
    assert norms[2] == expected_norms[2] == 0
    assert norms == pytest.approx(expected_norms, rel=NORM_TOLERANCE)
    assert weights.keys() == expected.keys()
    check_apart(weights, expected, MEAN_TOLERANCE_LR, record_property)


def without_gradients(path: str, case: Case) -> tuple[bool, ...]:
    """Return whether weights move in a step without gradients: by default; on request; after a
    batch that was refused, and another whose result was not awaited."""
    group = local_group(worker := MegatronWorker(case.config(path)))
    rows = batch(0)
    group.forward_backward(rows).result()
    group.optim_step(lr=1e-3).result()
    moved = []

    def watch(*steps) -> None:
        before = [param.detach().clone() for param in worker.held.values()]
        for step in steps:
            step()
        after = worker.held.values()
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))

    plain = AdamStep(0.0, 0.9, 1e-8, 0.0, 0.0)
    on_request = replace(plain, without_gradients=True)
    unsupervised = [replace(row, labels_S=torch.full_like(row.labels_S, IGNORE)) for row in rows]
    bad = [replace(row, image_grid_I3=torch.ones(1, 3)) for row in rows]
    watch(lambda: group.optim_step(adam=plain))  # an error, whose result is not read
    watch(lambda: group.forward_backward(unsupervised), lambda: group.optim_step(adam=plain))
    watch(lambda: group.optim_step(adam=on_request))  # without momentum, the weights stay
    decay = replace(on_request, weight_decay=0.1)
    watch(lambda: group.optim_step(adam=decay))
    watch(
        lambda: group.forward_backward(rows),
        lambda: group.forward_backward(bad),
        lambda: group.optim_step(adam=on_request),
    )
    return tuple(moved)


def test_a_step_without_gradients_is_asked_for(pool, tiny):
    moves = set(pool.run(without_gradients, 4, tiny(**SHALLOW), layout(pp=2, dp=2)))
    assert moves == {(False, False, False, True, False)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("weight_decay", float("inf")),
        ("clip_grad", float("nan")),
    ],
)
def test_settings_that_are_refused(name, value):
    with raises(ConfigError, place="optim_step", key=name) as caught:
        replace(STEPS[0][1], **{name: value})
    assert caught.value.found is value


def test_rates_that_are_refused(pool, tiny):
    """A refused step leaves the weights and gradients unchanged."""
    [(refused, same, norm)] = pool.run(with_bad_rates, 1, tiny(**SHALLOW))
    assert refused == 3 and same and norm > 0


def with_bad_rates(path: str) -> tuple[int, bool, float]:
    worker = MegatronWorker(layout().config(path))
    rows = make_rows(MIXED)
    worker.forward_backward(rows)
    before, refused = worker.forward(rows), 0
    for rate in (float("nan"), float("inf"), -1e-3):
        with raises(ConfigError, place="optim_step", key="lr") as caught:
            worker.optim_step(rate)
        assert caught.value.found is rate
        refused += 1
    same = all(map(torch.equal, before, worker.forward(rows)))
    return refused, same, worker.optim_step(1e-3)[0]
