"""Gradients and scores of distillation, for a global batch."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.training.data_feed import StepData
from megatron_vlm.training.losses import Objective, loss_of, totals
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class DistillObjective:
    """The divergence from the teacher of data.teacher. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker = worker
        keys = cfg.distill
        beta = {"forward": 0.0, "reverse": 1.0, "jsd": keys.beta}[keys.divergence]
        self.options: dict[str, Any] = {
            "beta": beta,
            "temperature": keys.temperature,
            "ce_coef": keys.ce_coef,
        }

    def forward_backward(self, batch: StepData) -> StepMetrics:
        """Compute the gradients of the mean loss over the supervised tokens of a global batch."""
        return self.worker.forward_backward(batch.micro_batches, loss="distill", **self.options)

    def scores(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the sum of the losses of a global batch with the sum of their weights, and the
        sums of the figures with the number of supervised tokens."""
        objective, stage = Objective.create("distill", self.options), self.worker.stage
        batches = self.worker.micro_batches(micro_batches)
        objective.check_batches(batches)

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(data)
            output = stage.predict(chunk, batch, objective.extra_output, objective.temperature)
            return output, partial(_report, objective, batch)

        with stage.evaluating():
            outputs = stage.run(batches, step, forward_only=True)
        loss, tokens, weight, means = totals(objective, batches, outputs, stage.grid, stage.device)
        sums = {name: mean * tokens for name, mean in means.items()}
        return {"loss": loss, "weight": weight, "tokens": float(tokens), **sums}


def _report(
    objective: Objective, batch: StageInput, output: Tensor, non_loss_data: bool = True
) -> dict[str, Tensor]:
    """Return the report of `loss_of`, for Megatron's forward-only schedules."""
    assert non_loss_data
    return loss_of(objective, batch, output)[2]
