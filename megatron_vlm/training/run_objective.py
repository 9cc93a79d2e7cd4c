"""Objective of a run: gradients of the data of a step, and scores of other data."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.training.losses import Objective, Totals, loss_of, totals
from megatron_vlm.training.row_losses import bradley_terry
from megatron_vlm.training.row_objectives import (
    EmbeddingObjective,
    PreferenceObjective,
    RerankObjective,
)
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class SupervisedObjective:
    """Cross-entropy of the trained tokens."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        return self.worker.forward_backward(batch.micro_batches)


class DistillObjective:
    """The divergence from the teacher of teacher.path. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker = worker
        keys = cfg.distill
        self.options: dict[str, Any] = {
            "beta": keys.share("forward"),
            "temperature": keys.temperature,
            "ce_coef": keys.ce_coef,
        }

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the supervised tokens."""
        return self.worker.forward_backward(batch.micro_batches, loss="distill", **self.options)

    def scores(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the sums of a global batch: of the losses, their weights, the tokens and the
        figures."""
        objective = Objective.create("distill", self.options)
        done = _totals(self.worker, objective, micro_batches)
        sums = {name: mean * done.count for name, mean in done.means.items()}
        known = {"loss": done.loss, "weight": done.weight, "tokens": float(done.count)}
        return known | sums


class RewardObjective:
    """The Bradley-Terry loss of a reward model. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.loss = worker, partial(bradley_terry, cfg.reward.center_coef)

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the pairs of a global batch."""
        return self.worker.forward_backward(batch.micro_batches, loss=self.loss)

    def scores(
        self, micro_batches: Sequence[MicroBatch], mismatched: Sequence[MicroBatch] = ()
    ) -> dict[str, float]:
        """Return the sums over the pairs of a global batch of the loss and of each figure, and the
        number of pairs."""
        done = _totals(self.worker, Objective.create(self.loss, {}), micro_batches)
        sums = {name: mean * done.weight for name, mean in done.means.items()}
        return {"examples": done.weight, "loss": done.loss, **sums}


def _totals(
    worker: MegatronWorker, objective: Objective, micro_batches: Sequence[MicroBatch]
) -> Totals:
    """Return the summed loss and the figures of a global batch, without gradients. A collective."""
    stage, batches = worker.stage, worker.micro_batches(micro_batches)
    objective.check_batches(batches)

    def read(batch: StageInput) -> Callable[..., dict[str, Tensor]]:
        return lambda output, non_loss_data: loss_of(objective, batch, output)[2]

    outputs = stage.evaluate(batches, objective.head, read)
    return totals(objective, batches, outputs, stage.grid, stage.device, divisor=1.0)


TrainObjective = (
    SupervisedObjective
    | PreferenceObjective
    | RewardObjective
    | DistillObjective
    | EmbeddingObjective
    | RerankObjective
)


def objective_of(worker: MegatronWorker, cfg: Config) -> TrainObjective:
    """Return the configured objective."""
    if cfg.train.objective == "distill":
        return DistillObjective(worker, cfg)
    if cfg.train.objective == "reward":
        return RewardObjective(worker, cfg)
    if spec_of(cfg).records == "chat":
        return SupervisedObjective(worker)
    if spec_of(cfg).records == "query":
        make = EmbeddingObjective if cfg.train.objective == "embed" else RerankObjective
        return make(worker, cfg)
    return PreferenceObjective(worker, cfg)
