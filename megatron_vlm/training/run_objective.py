"""The objective of a run: how a step turns its data into gradients."""

from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config
from megatron_vlm.training.data_feed import StepData
from megatron_vlm.training.distill_step import DistillObjective
from megatron_vlm.training.preference_step import PreferenceObjective
from megatron_vlm.training.retrieval_step import EmbeddingObjective, RerankObjective
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class SupervisedObjective:
    """Cross-entropy of the trained tokens."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker

    def forward_backward(self, batch: StepData) -> StepMetrics:
        return self.worker.forward_backward(batch.micro_batches)


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
