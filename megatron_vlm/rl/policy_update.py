"""Policy update on a rank, from the rows of a train batch.

Shapes: S tokens of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from megatron_vlm.config.schema import OWN
from megatron_vlm.config.teachers import teachers_of
from megatron_vlm.data.batches.collate import collate, filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.row import Row, place_row
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.rl.advantages import importance_weights
from megatron_vlm.rl.teacher_checks import check_ids_of_teacher
from megatron_vlm.rl.train_batch import TrainBatch, TrainRow, Update
from megatron_vlm.training.frozen_models import FrozenModels
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.row_scores import RowScores, top_targets
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

Score = TypeVar("Score")


@dataclass(frozen=True)
class LogProbGap:
    """Gap between the log-probs of sampler and trainer, over all drawn tokens of a step."""

    largest: float
    mean: float
    weights_cut: float  # share of the tokens whose importance weight was truncated


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
        }
        self.options = {name: value for name, value in options.items() if value is not None}
        self.names = Objective.create(rl.loss, self.options).value_names
        self.models = FrozenModels(worker)

    @cached_property
    def teachers(self) -> list[MegatronWorker]:
        """Teachers that the ranks run, loaded at first use, in the order of teacher.path."""
        return [self.models.teacher(path) for path in teachers_of(self.cfg).values()]

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
        like_S, teacher = each.sampler_log_probs_S, self.cfg.teacher
        old_S = values.old.get(number, like_S)
        advantages_S = torch.full_like(like_S, each.advantage)
        scores = values.teacher.get(number)
        targets: dict[str, Tensor] = {}
        if scores is not None and teacher.top_k:
            targets["teacher_ids_NJ"] = scores.ids_NJ
            targets["teacher_log_probs_NR"] = scores.log_probs_NR
        elif scores is not None:
            log_probs_S = torch.zeros_like(old_S)
            log_probs_S[each.is_drawn_S] = scores.label_log_probs_N
            advantages_S += teacher.coef * (log_probs_S - old_S)
        inputs = {
            "advantages": advantages_S * values.weights.get(number, torch.ones_like(like_S)),
            "old_log_probs": old_S,
            "ref_log_probs": values.reference.get(number, like_S),
        }
        return replace(
            each.row,
            values_S={name: inputs[name] for name in self.names},
            loss_weights_S=None if each.weight == 1 else torch.full_like(like_S, each.weight),
            **targets,
        )

    def values(self, train_batch: TrainBatch, rows: Mapping[int, TrainRow]) -> "Values":
        """Compute the inputs of the loss that are not in the train batch. This is a collective."""
        rl, has_teacher = self.cfg.rl, self.cfg.teacher.path is not None
        old: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        teacher = self._teacher_scores(train_batch, rows) if has_teacher else {}
        # Log-probs of the own decoder are the trainer's already, but not to the last digit. A
        # teacher that is the student has nothing to teach, and so not even a rounding error.
        if self.cfg.engine.name != OWN or has_teacher:
            old = self._log_probs_of_rows(self.worker, train_batch, rows)
        if self.cfg.engine.name != OWN:
            for number, train_row in rows.items():
                log_probs = old[number].tolist(), train_row.sampler_log_probs_S.tolist()
                weights[number] = torch.tensor(importance_weights(*log_probs, rl.max_weight))
        reference = {}
        if rl.kl_coef is not None:
            with self.models.reference() as model:
                reference = self._log_probs_of_rows(model, train_batch, rows)
        return Values(old, weights, reference, teacher)

    def teacher_kls(self, rows: Mapping[int, TrainRow], values: "Values") -> dict[int, float]:
        """Return the mean of student minus teacher log-prob over the drawn tokens of each row of
        the train batch: an estimate of the reverse KL for each token, which may be below 0. A
        collective."""
        if self.cfg.teacher.path is None:
            return {}
        local = {}
        for number, scores in values.teacher.items() if self.worker.grid.leads else ():
            student_N = values.old[number][rows[number].is_drawn_S]
            local[str(number)] = float((student_N - scores.label_log_probs_N).double().mean())
        gathered = all_gather_json(local, None, self.worker.platform.device)
        return dict(sorted((int(number), kl) for each in gathered for number, kl in each.items()))

    def _teacher_scores(
        self, train_batch: TrainBatch, rows: Mapping[int, TrainRow]
    ) -> dict[int, RowScores]:
        """Return the scores of this replica's rows: by engines, which the rows have already, or by
        the ranks' own teachers. A collective."""
        if self.cfg.teacher.engine != OWN:
            return {
                number: RowScores.from_table(each.teacher_table, each.is_drawn_S.nonzero()[:, 0])
                for number, each in rows.items()
                if each.teacher_table is not None
            }
        scores: dict[int, RowScores] = {}
        count = self.cfg.teacher.top_k or 0
        for place, model in enumerate(self.teachers):
            vocab, path = model.source.sizes.text.vocab, model.cfg.model.path
            check_ids_of_teacher(train_batch, place, vocab, path)
            own_rows = {number: each for number, each in rows.items() if each.teacher == place}
            score = partial(top_targets, model.stage, count=count, temperature=1.0)
            scores |= self._score_rows(model, score, train_batch, own_rows)
        return scores

    def _log_probs_of_rows(
        self, worker: MegatronWorker, train_batch: TrainBatch, rows: Mapping[int, TrainRow]
    ) -> dict[int, Tensor]:
        """Return the log-probs of these rows of this replica under a model."""
        return self._score_rows(worker, worker.forward, train_batch, rows)

    def _score_rows(
        self,
        worker: MegatronWorker,
        score: Callable[[list[MicroBatch]], list[Score]],
        train_batch: TrainBatch,
        rows: Mapping[int, TrainRow],
    ) -> dict[int, Score]:
        """Return the result of `score`, which runs the model of this worker, for each of these
        rows."""
        scores: dict[int, Score] = {}
        plain = {number: each.row for number, each in rows.items()}
        for update in train_batch.updates:
            numbers = sorted(n for n in self._local_numbers(update) if n in plain)
            scores |= zip(numbers, score(self._batches(update, plain, worker)), strict=True)
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
        tokens = worker.source.sizes.tokens
        batches = []
        for share in update.plan[self.worker.grid.dp.rank]:
            if not (numbers := [number for number in share if number in rows]):
                continue
            placed = [place_row(rows[number], tokens, f"row {number}", names) for number in numbers]
            batches.append(collate(placed, numbers, names))
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
        if self.cfg.engine.name == OWN:
            return None
        max_weight = self.cfg.rl.max_weight
        local_sums = [0.0, 0.0, 0.0, 0.0]  # largest, sum, cut, tokens
        for number, train_row in rows.items() if self.worker.grid.leads else ():
            differ_S = values.old[number] - train_row.sampler_log_probs_S
            differ_N = differ_S[train_row.is_drawn_S]
            local_sums[0] = max(local_sums[0], float(differ_N.abs().max()))
            local_sums[1] += float(differ_N.abs().sum())
            local_sums[2] += int((differ_N.exp() > max_weight).sum())
            local_sums[3] += len(differ_N)
        sums = all_gather_json(local_sums, None, self.worker.platform.device)
        largest, total, cut, tokens = zip(*sums, strict=True)
        count = sum(tokens)
        return LogProbGap(max(largest), sum(total) / count, sum(cut) / count)


@dataclass(frozen=True)
class Values:
    """Inputs of the loss for each token of this replica's rows, by row number. Where `old` lacks a
    row, the loss reads the sampler's log-probs instead."""

    old: Mapping[int, Tensor]  # log-probs before the step
    weights: Mapping[int, Tensor]  # weights of the advantages
    reference: Mapping[int, Tensor]  # log-probs under the reference model
    teacher: Mapping[int, RowScores]


def join_metrics(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Combine the metrics of several updates into those of the step."""
    names = list(dict.fromkeys(name for each in parts for name in each.means))
    means = {
        name: fmean(each.means[name] for each in parts if name in each.means) for name in names
    }
    loss, tokens = fmean(each.loss for each in parts), sum(each.num_tokens for each in parts)
    return StepMetrics(loss, tokens, None, means)
