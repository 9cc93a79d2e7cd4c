# .venv/bin/python -m pytest tests/training/test_prompt_targets.py
"""Rows with the targets of each place, one id or several. Their log-probs, losses and all gradients
are those of Hugging Face's model, however the targets relate to the next token."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.data.batches.collate import split_micro_batches
from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.qwen.model import mrope_positions
from megatron_vlm.family.spec import Tokens
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.reference import load_reference, row_logits
from tests.support.runs import call, collect_grads
from tests.support.suites import FULL

VOCAB = 509  # at TP2 one row of the vocabulary is padding
SMALL = SHALLOW | dict(vocab=VOCAB)
# The error is in fp32 on the CPU: absolute for log-probs, relative for loss and gradients. Measured
# worst cases: 9.6e-7, 2.6e-7 and 1.4e-6.
TOLERANCE = 5e-6

LAYOUTS = {
    "1x1": (layout(), {}),
    "tp2": (layout(tp=2), {"tied": True}),
    "pp2": (layout(pp=2), {}),
    "dp2": (layout(dp=2), {}),
    "experts": (layout(dp=2, ep=2), EXPERTS),
}
MARKS = {("tp2", True): (), ("1x1", False): FULL, ("pp2", True): FULL, ("experts", True): FULL}
PARAMS = [
    pytest.param(name, several, marks=MARKS.get((name, several), pytest.mark.slow))
    for name in LAYOUTS
    for several in (False, True)
]


def targeted(several: bool) -> list[Row]:
    """Return rows whose targets are any ids, with weights of any sign and 0. The number of rows is
    odd; one has one target per place, and one has no target at all."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for place, row in enumerate(make_rows(MIXED, VOCAB)[:7]):
        count = len(row.ids_S)
        shape = (count, 1 + place % 3) if several else (count,)
        targets = torch.randint(0, VOCAB, shape, generator=generator)
        targets[torch.rand(shape, generator=generator) < 0.2] = IGNORE
        if several:
            targets[:2, 0] = targets[:2, -1]  # the same id twice
        if place == 5:
            targets.fill_(IGNORE)
        weights = torch.randn(shape, generator=generator)
        weights[0] = 0
        old = -6 + 0.3 * torch.randn(shape, generator=generator)
        values = {"weights": weights, "advantages": weights, "old_log_probs": old}
        labels_S = torch.full_like(row.labels_S, IGNORE)
        rows.append(replace(row, labels_S=labels_S, targets=targets, values_S=values))
    return rows


def run(worker: MegatronWorker, rows: list[Row], as_batch: bool) -> dict[str, Any]:
    group = local_group(worker)
    batch = batch_of(rows).select(NAMES) if as_batch else rows
    results: dict[str, Any] = {"log_probs": group.forward(batch).result()}
    for loss in ("weighted_cross_entropy", "importance_sampling"):
        done = group.forward_backward(
            batch, return_per_token_outputs=True, loss=loss, divisor=1.0
        ).result()
        results[loss] = done.loss, done.log_probs, collect_grads(worker)
        assert done.num_tokens == sum(int((row.targets != IGNORE).sum()) for row in rows)
    return results


NAMES = (
    "ids",
    "targets",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "weights",
    "advantages",
    "old_log_probs",
)


def expected(path: str, rows: list[Row]) -> dict[str, Any]:
    model = load_reference(path)
    results: dict[str, Any] = {}
    whole = [row_logits(model, row).float().log_softmax(-1) for row in rows]
    for loss in ("weighted_cross_entropy", "importance_sampling"):
        model.zero_grad()
        total, all_log_probs = 0.0, []
        for row, log_probs in zip(rows, whole, strict=True):
            assert row.targets is not None
            targets = row.targets.view(len(row.ids_S), -1)
            picked = log_probs.gather(-1, targets.clamp(min=0)) * (targets != IGNORE)
            weights, old = (
                row.values_S[name].view_as(targets) for name in ("weights", "old_log_probs")
            )
            of_token = picked if loss[0] == "w" else (picked - old).exp()
            value = -(of_token * weights * (targets != IGNORE)).sum()
            value.backward(retain_graph=True)
            total += float(value.detach())
            all_log_probs.append(picked.detach().view(row.targets.shape))
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results["log_probs"], results[loss] = all_log_probs, (total, all_log_probs, grads)
    return results


def log_probs_apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("name", "several"), PARAMS)
def test_targets_are_those_of_hugging_face(name, several, pool, tiny, record_property):
    case, sizes = LAYOUTS[name]
    path, rows = tiny(**sizes | SMALL), targeted(several)
    reference = expected(path, rows)
    actual = pool.run(call, case.world, path, case, partial(run, rows=rows, as_batch=several))[0]
    worst = {"log_probs": log_probs_apart(actual["log_probs"], reference["log_probs"])}
    for loss in ("weighted_cross_entropy", "importance_sampling"):
        value, log_probs, grads = actual[loss]
        expected_value, expected_log_probs, expected_grads = reference[loss]
        worst[f"{loss} log_probs"] = log_probs_apart(log_probs, expected_log_probs)
        worst[f"{loss} loss"] = abs(value - expected_value) / abs(expected_value)
        errors = [
            float((grads[n] - g).norm() / g.norm()) for n, g in expected_grads.items() if g.any()
        ]
        assert len(errors) > 20
        worst[f"{loss} gradients"] = max(errors)
    record_property("worst", worst)
    assert max(worst.values()) <= TOLERANCE, worst


def test_labels_and_targets_share_a_micro_batch(pool, tiny):
    """A row with labels gives the same log-probs alone and next to rows with several targets."""
    labelled = replace(make_rows(MIXED, VOCAB)[0], values_S={})
    rows = [replace(row, values_S={}) for row in targeted(True)[:3]]
    alone, together = pool.run(
        call, 1, tiny(**SMALL), layout(), partial(beside, labelled=labelled, rows=rows)
    )[0]
    assert log_probs_apart(alone, together) <= TOLERANCE
    assert alone[0].any() and alone[0].shape == labelled.ids_S.shape


def beside(worker: MegatronWorker, labelled: Row, rows: list[Row]) -> Any:
    alone = [each for row in (labelled, *rows) for each in worker.forward([row])]
    return alone, worker.forward([labelled, *rows])


ROW = Row(torch.arange(4), torch.full((4,), IGNORE))
TOKENS = Tokens(100, 90, 91, 2, mrope_positions)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(targets=torch.arange(3)), r"targets .*\(3,\).* 4 tokens; give \[4\]"),
        (dict(targets=torch.zeros(4, 1, 1)), r"targets .*\(4, 1, 1\)"),
        (dict(targets=torch.zeros(4, 0)), r"targets .*\(4, 0\)"),
        (dict(targets=torch.tensor([1, 2, 100, 3])), r"targets\[2\]=100 "),
        (dict(targets=torch.tensor([[1, 2], [3, -5], [1, 1], [0, 0]])), r"targets\[1,1\]=-5 "),
        (dict(targets=torch.arange(4), labels_S=torch.arange(4)), "targets .* label -100"),
        (dict(targets=torch.arange(4), loss_weights_S=torch.ones(4)), "targets .* loss_weights"),
        (
            dict(targets=torch.ones(4, 2, dtype=torch.long), values_S={"w": torch.ones(4)}),
            r"w has shape \(4,\), .* targets \(4, 2\)",
        ),
        (dict(targets=torch.arange(4)), r"w is missing.* targets \(4,\)"),
        (
            dict(
                targets=torch.ones(4, 2, dtype=torch.long),
                values_S={"w": torch.tensor([[1, 2], [3, float("nan")], [1, 1], [0, 0]])},
            ),
            r"w\[1,1\]=nan",
        ),
    ],
)
def test_bad_targets_are_refused(changes, said):
    row = replace(ROW, **changes)
    names = ("w",) if row.values_S or "missing" in said else ()
    with pytest.raises(DataError, match=f"row 0: {said}"):
        split_micro_batches([row], 1, TOKENS, names)


def test_a_nan_where_nothing_is_predicted_is_nobodys(pool):
    values = {"w": torch.tensor([1.0, float("nan"), 2.0, 3.0])}
    row = replace(ROW, targets=torch.tensor([5, IGNORE, 6, 7]), values_S=values)
    (batch,) = split_micro_batches([row], 1, TOKENS, ("w",))
    assert batch.columns["w"].tolist() == [1, 2, 3]


def test_an_entropy_needs_one_target_a_place(pool, tiny):
    error = pool.run(call, 1, tiny(**SMALL), layout(), refused)[0]
    assert (error.key, error.found) == ("entropy_coef", 0.1)


def refused(worker: MegatronWorker) -> ConfigError:
    rows = targeted(True)[:2]
    with pytest.raises(ConfigError) as error:
        worker.forward_backward(rows, loss="importance_sampling", entropy_coef=0.1)
    return error.value
