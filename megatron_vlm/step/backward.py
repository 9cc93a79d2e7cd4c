"""One forward_backward on this rank: the schedule, the division, and what is reported."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_vlm.config.schema import ModelConfig
from megatron_vlm.data.batch.micro_batch import MicroBatch
from megatron_vlm.step.expert_load import busiest, take_expert_load
from megatron_vlm.step.gradients import Gradients
from megatron_vlm.step.losses import Objective, totals
from megatron_vlm.step.pipeline import ForwardStep, Stage
from megatron_vlm.step.router_losses import router_losses, values_of, with_losses


@dataclass(frozen=True)
class StepMetrics:
    """Figures of the global batch of one call, the same on every rank; on request, log-probs of
    this replica's rows."""

    # Mean over the supervised tokens by their weights, 0 where there are none; or their sum over
    # the divisor that was given.
    loss: float
    num_tokens: int  # supervised; optim_step applies nothing where no call had any
    log_probs: list[Tensor] | None = None  # per row [S], as `forward` returns them
    # What the loss reports, over the same; and with experts `expert_load`, see step/expert_load.py,
    # and of model.router_balance_loss and router_z_loss the losses without these coefficients.
    means: dict[str, float] = field(default_factory=dict)
    # With experts: the tokens of each [layers with experts, experts]. A controller does not get it.
    expert_load_LE: Tensor | None = None


@dataclass(frozen=True)
class Backward:
    """What a forward_backward is asked for, beside its batch."""

    objective: Objective
    divisor: float | None  # of the summed loss; None: the weights of the supervised tokens
    per_token: bool  # log-probs on the host of every rank
    accumulate: bool  # add to the gradients there are

    def run(
        self,
        stage: Stage,
        gradients: Gradients,
        model: ModelConfig,
        batches: Sequence[MicroBatch],
        step: ForwardStep,
    ) -> StepMetrics:
        """Take the batches through `step`, forward and backward. A collective."""
        stage.train(True)
        with gradients.of_call(self.accumulate):
            losses = router_losses(model, stage, batches, step, self.divisor)
            outputs = stage.run(batches, with_losses(step, losses), forward_only=False)
            loss_sum, count, weight, means = totals(
                self.objective, batches, outputs, stage.grid, stage.device
            )
            divided_by = self.divisor or weight or 1.0
            if count not in (0, divided_by):  # Megatron has divided by the count
                gradients.scale(count / divided_by)
            gradients.took(len(batches), count)
        log_probs = None
        if self.per_token:
            log_probs = stage.per_row(batches, [out["log_probs_N"] for out in outputs])
        load_LE = take_expert_load(stage.chunks, stage.sizes.text, stage.device)
        means |= values_of(losses) | ({} if load_LE is None else {"expert_load": busiest(load_LE)})
        return StepMetrics(loss_sum / divided_by, count, log_probs, means, load_LE)
