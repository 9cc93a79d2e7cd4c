"""The objective of a run: how a step turns its data into gradients."""

from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config
from megatron_vlm.training.data_feed import StepData
from megatron_vlm.training.preference_step import PreferenceObjective
from megatron_vlm.training.retrieval_step import EmbeddingObjective, RerankObjective
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class SupervisedObjective:
    """Cross-entropy of the trained tokens."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker

    def forward_backward(self, batch: StepData) -> StepMetrics:
        return self.worker.forward_backward(batch.micro_batches)


RunObjective = SupervisedObjective | PreferenceObjective | EmbeddingObjective | RerankObjective


def objective_of(worker: MegatronWorker, cfg: Config) -> RunObjective:
    """Return the configured objective."""
    if spec_of(cfg).records == "chat":
        return SupervisedObjective(worker)
    if spec_of(cfg).records == "query":
        make = EmbeddingObjective if cfg.train.objective == "embed" else RerankObjective
        return make(worker, cfg)
    return PreferenceObjective(worker, cfg)
