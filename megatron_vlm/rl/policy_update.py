"""Policy update on a rank, from the rows of a train batch.

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

_DISTINCT = 2**20  # row numbers below this are exact as floats, so neighbouring rows differ


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
        rl = self.cfg.rl
        options = {
            "clip_low": rl.clip_low,
            "clip_high": rl.clip_high,
            "kl_coef": rl.kl_coef,
            "entropy_coef": rl.entropy_coef,
        }
        self.options = {name: value for name, value in options.items() if value is not None}
        self.names = Objective.create(rl.loss, self.options).value_names

    @cached_property
    def reference(self) -> MegatronWorker:
        """Reference model: the initial model, in the same processes, loaded at first use. With LoRA
        its adapters are zero, or those of lora.path."""
        return MegatronWorker(self.cfg, training=False, watchdog=self.worker.watchdog)

    def gradients(
        self, update: Update, rows: Mapping[int, TrainRow], values: "Values"
    ) -> StepMetrics:
        """Compute the gradients of an update, in place of earlier gradients. This is a
        collective."""
        placed = {n: self._row(n, rows[n], values) for n in self._local_numbers(update)}
        batches = self._batches(update, placed, self.names)
        loss, divisor = self.cfg.rl.loss, update.divisor
        return self.worker.forward_backward(
            batches, False, loss, divisor, accumulate=False, **self.options
        )

    def _row(self, number: int, each: TrainRow, values: "Values") -> Row:
        like_S = each.sampler_log_probs_S
        inputs = {
            "advantages": each.advantage * values.weights.get(number, torch.ones_like(like_S)),
            "old_log_probs": values.old.get(number, like_S),
            "sequences": torch.full_like(like_S, number % _DISTINCT),
            "ref_log_probs": values.reference.get(number, like_S),
        }
        weights_S = None if each.weight == 1 else torch.full_like(like_S, each.weight)
        values_S = {name: inputs[name] for name in self.names}
        return replace(each.row, values_S=values_S, loss_weights_S=weights_S)

    def values(self, train_batch: TrainBatch, rows: Mapping[int, TrainRow]) -> "Values":
        """Compute the inputs of the loss that are not in the train batch. This is a collective."""
        rl = self.cfg.rl
        old: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        if rl.sampler != "own":  # log-probs of the own decoder are the trainer's already
            old = self._log_probs_of_rows(self.worker, train_batch, rows)
            for number, train_row in rows.items():
                log_probs = old[number].tolist(), train_row.sampler_log_probs_S.tolist()
                weights[number] = torch.tensor(importance_weights(*log_probs, rl.max_weight))
        reference = {}
        if rl.kl_coef is not None:
            reference = self._log_probs_of_rows(self.reference, train_batch, rows)
        return Values(old, weights, reference)

    def _log_probs_of_rows(
        self, worker: MegatronWorker, train_batch: TrainBatch, rows: Mapping[int, TrainRow]
    ) -> dict[int, Tensor]:
        """Return the log-probs of this replica's rows under a model."""
        log_probs: dict[int, Tensor] = {}
        plain = {number: each.row for number, each in rows.items()}
        for update in train_batch.updates:
            numbers = sorted(self._local_numbers(update))
            scored = worker.forward(self._batches(update, plain))
            log_probs |= zip(numbers, scored, strict=True)
        return log_probs

    def _batches(
        self, update: Update, rows: Mapping[int, Row], names: Sequence[str] = ()
    ) -> list[MicroBatch]:
        """Return this replica's micro-batches of an update, or a single filler batch if it has
        none."""
        tokens = self.worker.source.sizes.tokens
        batches = []
        for share in update.plan[self.worker.grid.dp.rank]:
            placed = [place_row(rows[number], tokens, f"row {number}", names) for number in share]
            batches.append(collate(placed, share, names))
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
        if self.cfg.rl.sampler == "own":
            return None
        max_weight = self.cfg.rl.max_weight
        local_sums = [0.0, 0.0, 0.0, 0.0]  # largest, sum, cut, tokens
        for number, train_row in rows.items() if self.worker.grid.leads else ():
            drawn_S = train_row.row.labels_S != IGNORE
            differ_N = (values.old[number] - train_row.sampler_log_probs_S)[drawn_S]
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


def join_metrics(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Combine the metrics of several updates into those of the step."""
    names = list(dict.fromkeys(name for each in parts for name in each.means))
    means = {
        name: fmean(each.means[name] for each in parts if name in each.means) for name in names
    }
    loss, tokens = fmean(each.loss for each in parts), sum(each.num_tokens for each in parts)
    return StepMetrics(loss, tokens, None, means, parts[-1].expert_load_LE)
