"""Objective of a run: gradients of the data of a step, and scores of other data."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.training.losses import Objective, loss_of, totals
from megatron_vlm.training.preference_step import PreferenceObjective
from megatron_vlm.training.retrieval_step import EmbeddingObjective, RerankObjective
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
        objective, stage = Objective.create("distill", self.options), self.worker.stage
        batches = self.worker.micro_batches(micro_batches)
        objective.check_batches(batches)

        def read(batch: StageInput) -> Callable[..., dict[str, Tensor]]:
            return lambda output, non_loss_data: loss_of(objective, batch, output)[2]

        outputs = stage.evaluate(batches, objective.head, read)
        done = totals(objective, batches, outputs, stage.grid, stage.device, divisor=1.0)
        sums = {name: mean * done.count for name, mean in done.means.items()}
        known = {"loss": done.loss, "weight": done.weight, "tokens": float(done.count)}
        return known | sums


TrainObjective = (
    SupervisedObjective
    | PreferenceObjective
    | DistillObjective
    | EmbeddingObjective
    | RerankObjective
)


def objective_of(worker: MegatronWorker, cfg: Config) -> TrainObjective:
    """Return the configured objective."""
    if cfg.train.objective == "distill":
        return DistillObjective(worker, cfg)
    if spec_of(cfg).records == "chat":
        return SupervisedObjective(worker)
    if spec_of(cfg).records == "query":
        make = EmbeddingObjective if cfg.train.objective == "embed" else RerankObjective
        return make(worker, cfg)
    return PreferenceObjective(worker, cfg)
