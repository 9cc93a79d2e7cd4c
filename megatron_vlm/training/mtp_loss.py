"""Loss of an MTP head: the forward KL divergence of its guesses from the model's own
distribution. It is a mean over all guesses of the global batch, also where the model's loss has
another divisor.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.model.head import HeadOutput
from megatron_vlm.training.pipeline import ForwardStep, Stage
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.token_losses import generalized_jsd


class MtpTerm:
    """The loss of one forward_backward. Every gradient of the step is divided in the end by what
    divides the model's loss, so this loss is multiplied by that first."""

    # The mean of the loss, and the share of guesses that the model would accept at a temperature of
    # 1.
    names = ("mtp_loss", "mtp_accepted")

    def __init__(self, stage: Stage, batches: Sequence[MicroBatch], divisor: float | None):
        self.stage, self.batches, self.divisor = stage, batches, divisor

    def added_to(self, step: ForwardStep) -> ForwardStep:
        """Return the forward step with this loss on the last stage. A collective."""
        guesses = sum(int((batch.supervised[1] > 0).sum()) for batch in self.batches)
        weights = sum(batch.weight for batch in self.batches)
        all_guesses, weight = self.stage.grid.sum_of_replicas(guesses, weights)
        self.guesses = max(all_guesses, 1.0)
        scale = (self.divisor if self.divisor and weight else weight) / self.guesses
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.stage.device)

        def read(read_loss: Any, output: HeadOutput) -> Any:
            loss, *rest = read_loss(output)
            events = output.mtp
            loss_N = generalized_jsd(events.guess_NR, events.own_NR, beta=0)
            values_2N = torch.stack([loss_N, events.accepted_N]) * events.is_guess_N
            self.sums += values_2N.detach().double().sum(1)
            return loss + scale * values_2N[0].sum(), *rest

        def step_with_mtp(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            output, read_loss = step(data, chunk)
            return output, partial(read, read_loss)

        return step_with_mtp

    def values(self) -> DeferredFigures:
        """Return each figure, after a backward. A collective."""
        grid = self.stage.grid
        if grid.is_last_stage:
            dist.all_reduce(self.sums, group=grid.dp.group)
        grid.from_last_stage(self.sums)
        return DeferredFigures(self.sums / self.guesses)
