# .venv/bin/python -m pytest tests/training/test_multi_model.py
"""forward_backward of several models in one pass through the pipeline: each model gets, bit for
bit, the results that it gets alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.controller import local_group
from megatron_vlm.controller.torchrun import SummedLoss, backward_together
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import DataError
from megatron_vlm.training.backward import LossCall, StepMetrics
from megatron_vlm.training.multi_model import run_together
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import same
from tests.support.runs import Case, collect_grads, my_rows

DROPPED = LoraConfig(rank=3, alpha=6, targets=("attention", "mlp", "head"), dropout=0.3)
MERGER = LoraConfig(rank=2, alpha=8, targets=("attention",), train=("merger",))
SMALL = LoraConfig(rank=2, alpha=8, targets=("mlp", "head"))
WHOLE = LoraConfig()
ALONE = {"overlap_grad_reduce": False}  # an overlapped reduction would end a pass of one model
BALANCED = {"router_balance_loss": 0.1, "router_z_loss": 0.01}

LAYOUTS: dict[str, tuple[Case, dict[str, object]]] = {
    "1x1": (layout(), {}),
    "pp2": (layout(pp=2), {}),
    "pp2-tied": (layout(pp=2, recompute="full"), {"tied": True, **SHALLOW}),
    "tp2-pp2": (layout(tp=2, pp=2), {}),
    "pp4": (layout(pp=4), {"layers": 4}),
    "pp2x2": (layout(pp=2, virtual_stages=2), {"layers": 4}),
    "pp2-dp2": (layout(pp=2, dp=2, **ALONE), {}),
    "pp2-bf16": (replace(layout(pp=2), train={"precision": "bf16"}), {}),
    "experts-pp2": (layout(pp=2, **BALANCED), EXPERTS),
    "experts-ep2": (layout(dp=2, ep=2, **ALONE), EXPERTS),
}

Call = tuple[list[Row], str, dict[str, float]]
Doing = Callable[[list[MegatronWorker], Sequence[Call]], list[StepMetrics]]


def calls(number: int) -> list[Call]:
    """Return a call for each of three models, with very different lengths and different losses. The
    last call has no supervised token where `number` is 1."""
    first, second = make_rows(MIXED, seed=number), make_rows(MIXED, seed=number + 10)
    weighted = [
        replace(row, values_S={"weights": torch.linspace(-1, 2, len(row.ids_S))}) for row in second
    ]
    third = make_rows(MIXED, seed=number + 20)[: 2 + number]
    if number == 1:
        third = [replace(row, labels_S=torch.full_like(row.ids_S, IGNORE)) for row in third]
    return [
        (first * 2, "cross_entropy", {"entropy_coef": 0.1}),
        (weighted[:5], "weighted_cross_entropy", {}),  # replicas have 2 and 3 of these
        (third, "cross_entropy", {}),
    ]


def in_turns(workers: list[MegatronWorker], asked: Sequence[Call]) -> list[StepMetrics]:
    return [
        worker.forward_backward(my_rows(rows), True, loss, 1.0, True, **options)
        for worker, (rows, loss, options) in zip(workers, asked, strict=True)
    ]


def together(workers: list[MegatronWorker], asked: Sequence[Call]) -> list[StepMetrics]:
    return run_together(
        [
            worker.backward(my_rows(rows), LossCall(True, loss, 1.0, True, options))
            for worker, (rows, loss, options) in zip(workers, asked, strict=True)
        ]
    )


def learn(path: str, case: Case, loras: list[LoraConfig], doing: Doing) -> Any:
    cfg = case.config(path)
    base = MegatronWorker(cfg, training=False)
    workers = [
        MegatronWorker(replace(cfg, lora=lora), base=base if lora.rank else None) for lora in loras
    ]
    results: list[Any] = []
    for _ in range(2):
        # The second call's gradients are added to those of the first.
        results += [plain(doing(workers, calls(number))) for number in range(2)]
        results += [collect_grads(worker) for worker in workers]
        results += [worker.optim_step(lr=1e-2) for worker in workers]
    return results


def plain(done: list[StepMetrics]) -> list[Any]:
    return [[m.loss, m.num_tokens, m.log_probs, m.means] for m in done]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.full if n == "pp2-tied" else pytest.mark.slow)
        for n in LAYOUTS
    ],
)
def test_models_in_one_pass_get_what_each_gets_alone(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    loras = [SMALL, SMALL, MERGER] if "experts" in name else [DROPPED, MERGER, WHOLE]
    path = tiny(**sizes)
    alone = pool.run(learn, case.world, path, case, loras, in_turns)
    in_one_pass = pool.run(learn, case.world, path, case, loras, together)
    for actual, expected in zip(in_one_pass, alone, strict=True):
        assert same(actual, expected)
    gradients = alone[0][2:5]
    assert all(any(grad.abs().max() > 0 for grad in each.values()) for each in gradients)


class RefusedError(Exception):
    pass


def refuse(log_probs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if len(log_probs_N):
        raise RefusedError
    return log_probs_N, {}


def failing(path: str) -> Any:
    """Return the gradients before and after a pass that failed in its second model. Only the
    earlier gradients are left."""
    cfg = layout().config(path)
    base = MegatronWorker(cfg, training=False)
    workers = [MegatronWorker(replace(cfg, lora=lora), base=base) for lora in (SMALL, MERGER)]
    rows = make_rows(MIXED)
    workers[0].forward_backward(rows[:3], accumulate=True)
    before = collect_grads(workers[0])
    second = workers[1].backward(rows, LossCall(loss=refuse, accumulate=True))
    first = workers[0].backward(rows, LossCall(accumulate=True))
    with pytest.raises(RefusedError):
        run_together([first, second])
    after = collect_grads(workers[0])
    return before, after, [worker.gradients.some for worker in workers]


def test_a_pass_that_fails_leaves_the_gradients_of_earlier_calls(pool, tiny):
    [(before, after, some)] = pool.run(failing, 1, tiny(**SHALLOW))
    assert same(before, after) and some == [True, False]


def refused(path: str, case: Case) -> Any:
    """Give one group a row that it cannot take on one replica, and return the results before and
    after."""
    cfg = case.config(path)
    base = MegatronWorker(cfg, training=False)
    workers = [MegatronWorker(replace(cfg, lora=lora), base=base) for lora in (SMALL, MERGER)]
    groups = [local_group(worker) for worker in workers]
    rows = make_rows(MIXED)[:4]
    bad = [*rows[:3], replace(rows[3], ids_S=rows[3].ids_S + 10**6)]

    def asked(*batches: list[Row]) -> list[SummedLoss]:
        return [
            SummedLoss(group, rows, "cross_entropy", {})
            for group, rows in zip(groups, batches, strict=True)
        ]

    done = backward_together(asked(rows, rows[:3]))
    before = [collect_grads(worker) for worker in workers]
    with pytest.raises(DataError, match=r"rank \d: row 3"):
        backward_together(asked(rows, bad))
    after = [collect_grads(worker) for worker in workers]
    alone = groups[1].forward_backward(rows[:3], True, divisor=1.0).result()
    norm, _ = groups[0].optim_step(1e-2).result()
    return before, after, plain(done)[1], plain([alone])[0], norm


def test_a_group_that_is_refused_changes_nothing(pool, tiny):
    case = layout(pp=2, dp=2, **ALONE)
    for before, after, done, alone, norm in pool.run(refused, case.world, tiny(**SHALLOW), case):
        assert same(before, after)
        assert same(done, alone) and len(done[2]) == 3 and norm > 0
