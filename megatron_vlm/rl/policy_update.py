"""One rank's part of learning from a lesson.

Shapes: S tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch, collate, filler_batch
from megatron_vlm.data.tokens.row import IGNORE, Row, place_row
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.rl.advantages import importance_weights
from megatron_vlm.rl.train_batch import TrainBatch, TrainRow, Update
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

_DISTINCT = 2**20  # numbers of rows that a float holds exactly, and neighbours differ


@dataclass(frozen=True)
class LogProbGap:
    """How far the sampler's log-probs are from the trainer's, over all drawn tokens of a step."""

    largest: float
    mean: float
    weights_cut: float  # share of the tokens


class PolicyUpdater:
    """Scores the rows of a lesson, where that is needed, and makes their gradients."""

    def __init__(self, worker: MegatronWorker):
        self.worker, self.cfg = worker, worker.cfg
        rl = self.cfg.rl
        given = {
            "clip_low": rl.clip_low,
            "clip_high": rl.clip_high,
            "kl_coef": rl.kl_coef,
            "entropy_coef": rl.entropy_coef,
        }
        self.options = {name: value for name, value in given.items() if value is not None}
        self.names = Objective.create(rl.loss, self.options).value_names

    @cached_property
    def reference(self) -> MegatronWorker:
        """The model that training began with, in the same processes, made where it is asked:
        adapters begin at nothing, or where lora.path left them."""
        return MegatronWorker(self.cfg, training=False, watchdog=self.worker.watchdog)

    def gradients(
        self, update: Update, rows: Mapping[int, TrainRow], values: "Values"
    ) -> StepMetrics:
        """Those of one update, in place of any before. A collective."""
        placed = {n: self._row(n, rows[n], values) for n in self._mine(update)}
        batches = self._batches(update, placed, self.names)
        loss, divisor = self.cfg.rl.loss, update.divisor
        return self.worker.forward_backward(
            batches, False, loss, divisor, accumulate=False, **self.options
        )

    def _row(self, number: int, each: TrainRow, values: "Values") -> Row:
        like_S = each.sampler_log_probs_S
        known = {
            "advantages": each.advantage * values.weights.get(number, torch.ones_like(like_S)),
            "old_log_probs": values.old.get(number, like_S),
            "sequences": torch.full_like(like_S, number % _DISTINCT),
            "ref_log_probs": values.reference.get(number, like_S),
        }
        weights_S = None if each.weight == 1 else torch.full_like(like_S, each.weight)
        values_S = {name: known[name] for name in self.names}
        return replace(each.row, values_S=values_S, loss_weights_S=weights_S)

    def values(self, lesson: TrainBatch, rows: Mapping[int, TrainRow]) -> "Values":
        """What the loss reads that is not in the lesson. A collective."""
        rl = self.cfg.rl
        old: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        if rl.sampler != "own":  # whose log-probs are the trainer's own
            old = self._scored(self.worker, lesson, rows)
            for number, each in rows.items():
                both = old[number].tolist(), each.sampler_log_probs_S.tolist()
                weights[number] = torch.tensor(importance_weights(*both, rl.max_weight))
        reference = {}
        if rl.kl_coef is not None:
            reference = self._scored(self.reference, lesson, rows)
        return Values(old, weights, reference)

    def _scored(
        self, worker: MegatronWorker, lesson: TrainBatch, rows: Mapping[int, TrainRow]
    ) -> dict[int, Tensor]:
        """Log-probs of this replica's rows by a model."""
        found: dict[int, Tensor] = {}
        plain = {number: each.row for number, each in rows.items()}
        for update in lesson.updates:
            numbers = sorted(self._mine(update))
            scored = worker.forward(self._batches(update, plain))
            found |= zip(numbers, scored, strict=True)
        return found

    def _batches(
        self, update: Update, rows: Mapping[int, Row], names: Sequence[str] = ()
    ) -> list[MicroBatch]:
        """This replica's micro-batches of an update; one of nothing where it has none."""
        tokens = self.worker.source.sizes.tokens
        found = []
        for share in update.plan[self.worker.grid.dp.rank]:
            placed = [place_row(rows[number], tokens, f"row {number}", names) for number in share]
            found.append(collate(placed, share, names))
        return found or [filler_batch()]

    def _mine(self, update: Update) -> list[int]:
        return [number for share in update.plan[self.worker.grid.dp.rank] for number in share]

    def mine(self, lesson: TrainBatch) -> dict[int, TrainRow]:
        """The rows of this replica, by their numbers in the lesson."""
        numbers = (number for update in lesson.updates for number in self._mine(update))
        return {number: lesson.rows[number] for number in numbers}

    def apart(self, rows: Mapping[int, TrainRow], values: "Values") -> LogProbGap | None:
        """None where the sampler is the trainer. A collective."""
        if self.cfg.rl.sampler == "own":
            return None
        most = self.cfg.rl.max_weight
        mine = [0.0, 0.0, 0.0, 0.0]  # largest, sum, cut, tokens
        for number, each in rows.items() if self.worker.grid.leads else ():
            drawn_S = each.row.labels_S != IGNORE
            differ_N = (values.old[number] - each.sampler_log_probs_S)[drawn_S]
            mine[0] = max(mine[0], float(differ_N.abs().max()))
            mine[1] += float(differ_N.abs().sum())
            mine[2] += int((differ_N.exp() > most).sum())
            mine[3] += len(differ_N)
        found = all_gather_json(mine, None, self.worker.platform.device)
        largest, total, cut, tokens = zip(*found, strict=True)
        count = sum(tokens)
        return LogProbGap(max(largest), sum(total) / count, sum(cut) / count)


@dataclass(frozen=True)
class Values:
    """Of this replica's rows, by their numbers: what the loss reads of each token. Where there is
    none, that of the sampler stands for `old`."""

    old: Mapping[int, Tensor]  # log-probs before the step
    weights: Mapping[int, Tensor]  # of the advantages
    reference: Mapping[int, Tensor]


def joined(parts: Sequence[StepMetrics]) -> StepMetrics:
    """The figures of several updates as those of one step."""
    names = list(dict.fromkeys(name for each in parts for name in each.means))
    means = {
        name: fmean(each.means[name] for each in parts if name in each.means) for name in names
    }
    loss, tokens = fmean(each.loss for each in parts), sum(each.num_tokens for each in parts)
    return StepMetrics(loss, tokens, None, means, parts[-1].expert_load_LE)
