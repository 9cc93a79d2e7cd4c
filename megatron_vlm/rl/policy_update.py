"""Policy update on a rank, from the rows of a train batch.

Shapes: S tokens of a row, N drawn ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.config.teachers import SELF, teachers_of
from megatron_vlm.data.batches.collate import collate, filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.row import Row, place_row
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.engines.engine_kinds import engine_kind
from megatron_vlm.rl.teacher_engines import check_ids_of_teacher
from megatron_vlm.rl.train_batch import (
    TrainBatch,
    TrainRow,
    Update,
    View,
    drawn,
    is_drawn,
    of_teacher,
    onto,
    replayed,
    same,
)
from megatron_vlm.training.frozen_models import FrozenModels
from megatron_vlm.training.losses import TEACHER_WEIGHTS, Objective
from megatron_vlm.training.row_scores import RowScores, top_targets
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

Score = TypeVar("Score")
MAX_LOG = 700.0  # exp of a larger number may overflow float64


@dataclass(frozen=True)
class LogProbGap:
    """Gap between the log-probs of sampler and trainer, over all drawn tokens of a step."""

    largest: float
    mean: float
    weights_cut: float  # share of the tokens whose importance weight was truncated
    masked: float | None = None  # share of the tokens without policy loss; None: no such limits


class PolicyUpdater:
    """Updater that scores the rows of a train batch, where needed, and computes their gradients."""

    def __init__(self, worker: MegatronWorker):
        self.worker, self.cfg = worker, worker.cfg
        rl, teacher = self.cfg.rl, self.cfg.teacher
        options = {
            "clip_low": rl.clip_low,
            "clip_high": rl.clip_high,
            "kl_coef": rl.kl_coef,
            "entropy_coef": rl.entropy_coef,
            "teacher_coef": teacher.coef if teacher.top_k else None,
            "teacher_beta": self.cfg.distill.share("reverse") if teacher.top_k else None,
        }
        self.options = {name: value for name, value in options.items() if value is not None}
        self.names = Objective.create(rl.loss, self.options).value_names
        if teacher.top_k and teacher.view is not None:  # some rows may have none
            self.names += (TEACHER_WEIGHTS,)
        self.models = FrozenModels(worker)
        self.draws_on_ranks = engine_kind(self.cfg.engine.name).on_ranks
        self.teaches_on_ranks = engine_kind(teacher.engine).on_ranks

    def teachers(self) -> Iterator[MegatronWorker]:
        """Yield the teachers that the ranks run, in the order of teacher.path. They are loaded at
        first use. Use each before you ask for the next: adapters may be off until then."""
        for path in teachers_of(self.cfg).values():
            if path != SELF:
                yield self.models.teacher(path)
            elif self.cfg.teacher.weights == "live":
                yield self.worker
            else:
                with self.models.reference() as model:
                    yield model

    def gradients(
        self, update: Update, rows: Mapping[int, TrainRow], values: "Values"
    ) -> StepMetrics:
        """Compute the gradients of an update, in place of earlier gradients. This is a
        collective."""
        placed = {n: self._row(n, rows[n], values) for n in self._local_numbers(update)}
        batches = self._batches(update, placed, self.worker, self.names)
        loss = self.cfg.rl.loss
        return self.worker.forward_backward(
            batches, False, loss, update.divisor, accumulate=False, **self.options
        )

    def _row(self, number: int, each: TrainRow, values: "Values") -> Row:
        sampled_N, teacher = each.sampler_log_probs_N, self.cfg.teacher
        old_N = values.old.get(number, sampled_N)
        advantages_N = torch.full_like(sampled_N, each.advantage)
        scores = values.teacher.get(number)
        targets: dict[str, Any] = {}
        if teacher.top_k:
            events = scores or RowScores.uniform(len(old_N), teacher.top_k)
            targets["teacher_ids_NJ"] = events.ids_NJ
            targets["teacher_log_probs_NR"] = events.log_probs_NR
        elif scores is not None:
            advantages_N += teacher.coef * (scores.label_log_probs_N - old_N)
        inputs = {
            TEACHER_WEIGHTS: torch.full_like(old_N, scores is not None),
            "advantages": advantages_N * values.weights.get(number, torch.ones_like(sampled_N)),
            "old_log_probs": old_N,
            "ref_log_probs": values.reference.get(number, sampled_N),
        }
        weights_S = None if each.weight == 1 else torch.full(each.row.ids_S.shape, each.weight)
        if number in values.loss_weights:
            weights_S = onto(values.loss_weights[number], each.row)
        return replace(
            replayed(each),
            values_S={name: onto(inputs[name], each.row) for name in self.names},
            loss_weights_S=weights_S,
            **targets,
        )

    def values(self, train_batch: TrainBatch, rows: Mapping[int, TrainRow]) -> "Values":
        """Compute the inputs of the loss that are not in the train batch. This is a collective."""
        rl, has_teacher = self.cfg.rl, self.cfg.teacher.path is not None
        old: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        teacher = self.teacher_scores(train_batch, rows) if has_teacher else {}
        # Log-probs of the own decoder are the trainer's already, but not to the last digit. A
        # teacher that is the student has nothing to teach, and so not even a rounding error.
        if has_teacher or not self.draws_on_ranks:
            old = self.drawn_log_probs(self.worker, train_batch, rows, replayed)
        if not self.draws_on_ranks:
            for number, train_row in rows.items():
                log_probs = old[number].tolist(), train_row.sampler_log_probs_N.tolist()
                limits = rl.max_weight, rl.mask_weight
                weights[number] = torch.tensor(importance_weights(*log_probs, *limits))
        reference = {}
        if rl.kl_coef is not None:
            with self.models.reference() as model:
                reference = self.drawn_log_probs(model, train_batch, rows)
        return Values(old, weights, reference, teacher)

    def teacher_kls(self, rows: Mapping[int, TrainRow], values: "Values") -> dict[int, float]:
        """Return the mean of student minus teacher log-prob over the drawn tokens of each row of
        the train batch: an estimate of the reverse KL for each token, which may be below 0. A
        collective."""
        if self.cfg.teacher.path is None:
            return {}
        local = {}
        for number, scores in values.teacher.items() if self.worker.grid.leads else ():
            gap_N = values.old[number] - scores.label_log_probs_N
            local[str(number)] = float(gap_N.double().mean())
        gathered = all_gather_json(local)
        return dict(sorted((int(number), kl) for each in gathered for number, kl in each.items()))

    def teacher_scores(
        self, train_batch: TrainBatch, rows: Mapping[int, TrainRow], view: View = of_teacher
    ) -> dict[int, RowScores]:
        """Return the scores of these rows of this replica: by engines, which the rows have already,
        or by the ranks' own teachers, which see this view of them. A collective."""
        if not self.teaches_on_ranks:
            return {
                number: RowScores.from_table(each.teacher_table, is_drawn(each.row).nonzero()[:, 0])
                for number, each in rows.items()
                if each.teacher_table is not None
            }
        scores: dict[int, RowScores] = {}
        count = self.cfg.teacher.top_k or 0
        for place, model in enumerate(self.teachers()):
            vocab, path = model.source.sizes.text.vocab, model.cfg.model.path
            check_ids_of_teacher(train_batch, place, vocab, path)
            own_rows = {n: view(each) for n, each in rows.items() if each.teacher == place}
            score = partial(top_targets, model.stage, count=count, temperature=1.0)
            scores |= self._score_rows(model, score, train_batch, own_rows)
        return scores

    def drawn_log_probs(
        self,
        worker: MegatronWorker,
        train_batch: TrainBatch,
        rows: Mapping[int, TrainRow],
        view: View = same,
    ) -> dict[int, Tensor]:
        """Return the log-probs [N] of the drawn tokens of these rows of this replica, under a
        model that sees this view of them. This is a collective."""
        views = {number: view(each) for number, each in rows.items()}
        scores = self._score_rows(worker, worker.forward, train_batch, views)
        return {number: drawn(scores_S, views[number]) for number, scores_S in scores.items()}

    def _score_rows(
        self,
        worker: MegatronWorker,
        score: Callable[[list[MicroBatch]], list[Score]],
        train_batch: TrainBatch,
        rows: Mapping[int, Row],
    ) -> dict[int, Score]:
        """Return the result of `score`, which runs the model of this worker, for each of these
        rows."""
        scores: dict[int, Score] = {}
        for update in train_batch.updates:
            numbers = sorted(number for number in self._local_numbers(update) if number in rows)
            scores |= zip(numbers, score(self._batches(update, rows, worker)), strict=True)
        return scores

    def _batches(
        self,
        update: Update,
        rows: Mapping[int, Row],
        worker: MegatronWorker,
        names: Sequence[str] = (),
    ) -> list[MicroBatch]:
        """Return this replica's micro-batches of an update, with these rows alone, in the form of a
        worker's model. Without rows there is a single filler batch."""
        tokens, limit = worker.source.sizes.tokens, self.cfg.train.micro_batch_tokens
        batches = []
        for share in update.plan[self.worker.grid.dp.rank]:
            own = [number for number in share if number in rows]
            for numbers in within_limit(own, rows, limit) if own else ():
                placed = [place_row(rows[n], tokens, f"row {n}", names) for n in numbers]
                batches.append(collate(placed, numbers))
        return batches or [filler_batch()]

    def _local_numbers(self, update: Update) -> list[int]:
        return [number for share in update.plan[self.worker.grid.dp.rank] for number in share]

    def local_rows(self, train_batch: TrainBatch) -> dict[int, TrainRow]:
        """Return the rows of this replica, by their numbers in the train batch."""
        numbers = (
            number for update in train_batch.updates for number in self._local_numbers(update)
        )
        return {number: train_batch.rows[number] for number in numbers}

    def log_prob_gap(self, rows: Mapping[int, TrainRow], values: "Values") -> LogProbGap | None:
        """Return the gap between the log-probs of sampler and trainer; None where the trainer's own
        decoder has drawn the answers. This is a collective."""
        if self.draws_on_ranks:
            return None
        rl = self.cfg.rl
        low, high = rl.mask_weight or (0.0, math.inf)
        local_sums = [0.0] * 5  # largest, sum, cut, masked, tokens
        for number, train_row in rows.items() if self.worker.grid.leads else ():
            differ_N = values.old[number] - train_row.sampler_log_probs_N
            local_sums[0] = max(local_sums[0], float(differ_N.abs().max()))
            local_sums[1] += float(differ_N.abs().sum())
            ratio_N = differ_N.exp()
            local_sums[2] += int((ratio_N > rl.max_weight).sum())
            local_sums[3] += int(((ratio_N < low) | (ratio_N > high)).sum())
            local_sums[4] += len(differ_N)
        sums = all_gather_json(local_sums)
        largest, total, cut, masked, tokens = zip(*sums, strict=True)
        count = sum(tokens)
        share = None if rl.mask_weight is None else sum(masked) / count
        return LogProbGap(max(largest), sum(total) / count, sum(cut) / count, share)


def within_limit(numbers: list[int], rows: Mapping[int, Row], limit: int | None) -> list[list[int]]:
    """Divide a micro-batch whose views are longer than the rows that it was planned for. Each rank
    of the replica divides it alike, and one that is within the limit of tokens stays as it was."""
    lengths = {number: len(rows[number].ids_S) for number in numbers}
    if limit is None or len(numbers) == 1 or max(lengths.values()) * len(numbers) <= limit:
        return [numbers]
    ordered, half = sorted(numbers, key=lambda number: lengths[number]), len(numbers) // 2
    parts = ordered[:half], ordered[half:]
    return [divided for part in parts for divided in within_limit(part, rows, limit)]


@dataclass(frozen=True)
class Values:
    """Inputs of the loss for the drawn tokens [N] of this replica's rows, by row number. Where
    `old` lacks a row, the loss reads the sampler's log-probs instead."""

    old: Mapping[int, Tensor]  # log-probs before the step
    weights: Mapping[int, Tensor]  # weights of the advantages
    reference: Mapping[int, Tensor]  # log-probs under the reference model
    teacher: Mapping[int, RowScores]
    # Weights of the losses. Where they lack a row, all of its tokens have the row's weight.
    loss_weights: Mapping[int, Tensor] = field(default_factory=dict)


def join_metrics(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Combine the metrics of several updates into the step's metrics."""
    names = list(dict.fromkeys(name for each in parts for name in each.means))
    means = {
        name: fmean(each.means[name] for each in parts if name in each.means) for name in names
    }
    loss, tokens = fmean(each.loss for each in parts), sum(each.num_tokens for each in parts)
    return StepMetrics(loss, tokens, None, means)


def importance_weights(
    old_log_probs: Sequence[float],
    sampler_log_probs: Sequence[float],
    max_weight: float | None,
    mask: Sequence[float] | None = None,
) -> list[float]:
    """Return the weight of each token for truncated importance sampling: the ratio of the trainer's
    to the sampler's probability, at most `max_weight`, and 0 if the ratio is not within `mask`. If
    `max_weight` is None, all weights are 1.
    Multiply the token's advantage by its weight: a weight of the loss would enter the divisor and
    the KL term, too."""
    assert len(old_log_probs) == len(sampler_log_probs)
    if max_weight is None:
        return [1.0] * len(old_log_probs)
    assert max_weight > 0, max_weight
    log_ratio = np.subtract(old_log_probs, sampler_log_probs, dtype=np.float64)
    ratio = np.exp(np.minimum(log_ratio, MAX_LOG))
    low, high = mask or (0.0, math.inf)
    is_within = (low <= ratio) & (ratio <= high)
    weights: list[float] = np.where(is_within, np.minimum(ratio, max_weight), 0.0).tolist()
    return weights
