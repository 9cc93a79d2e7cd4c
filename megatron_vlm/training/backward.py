"""forward_backward on this rank: the schedule, the division, and what is reported."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.config.schema import ModelConfig
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.model.router import RouterLosses
from megatron_vlm.training.expert_routing import busiest, take_expert_load
from megatron_vlm.training.losses import LossFunction, Objective, totals
from megatron_vlm.training.multi_model import run_together
from megatron_vlm.training.pipeline import ForwardStep, Stage
from megatron_vlm.training.router_losses import router_losses, values_of, with_losses

# The gradients of this rank from one step of the optimizer to the next: those of one call, or the
# sum of several.
#
# Megatron ends every backward with what may be done once: it reduces the buffers over the replicas,
# adds up tied embeddings over the stages, and divides. So what earlier calls gave waits apart while
# a call computes, and is added when that is done.


class Gradients:
    """What is in Megatron's gradient buffers between two calls."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer):
        self.chunks, self.optimizer = list(chunks), optimizer
        self.some = False  # whether a supervised token of a global batch is in them
        self.micro_batches = 0  # of this replica that are in them
        self.calls = 0  # that were completed, ever

    @contextmanager
    def of_call(self, add: bool) -> Iterator[None]:
        """A backward over empty buffers. In the end they hold its gradients alone, or with `add`
        those of earlier calls as well. After an error they hold, with `add`, those of the earlier
        calls, else none."""
        add = add and self.some
        earlier = [part.clone() for part in self._finished()] if add else []
        taken = self.micro_batches
        self.clear()
        if add:
            self.micro_batches = taken
        try:
            yield
        except BaseException:
            self.clear()
            for part, kept in zip(self._finished(), earlier, strict=add):
                part.copy_(kept)
            self.some, self.micro_batches = add, taken if add else 0
            raise
        for part, kept in zip(self._finished(), earlier, strict=add):
            part.add_(kept)
        self.some = self.some or add
        self.calls += 1

    def took(self, micro_batches: int, supervised: int) -> None:
        """A call's backward is done, over so many micro-batches of this replica, with so many
        supervised tokens in the global batch."""
        self.micro_batches += micro_batches
        self.some = self.some or supervised > 0

    def scale(self, factor: float) -> None:
        """Multiply those of the call by a number."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def clear(self) -> None:
        """Empty buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forget()

    def forget(self) -> None:
        """What they hold is spent, or of no use: the next call begins anew."""
        self.some, self.micro_batches = False, 0

    def _finished(self) -> list[Tensor]:
        """The parts of the buffers that are reduced over the replicas: all, or this replica's share
        of each bucket where the optimizer is sharded."""
        return [
            _share(group, bucket.grad_data)
            for chunk in self.chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            for bucket in group.buckets
        ]


def _share(group: Any, data: Tensor) -> Tensor:
    if not group.ddp_config.use_distributed_optimizer:
        return data
    shares = shard_buffer(data, group.intra_distributed_optimizer_instance_size)
    share: Tensor = shares[group.intra_distributed_optimizer_instance_rank]
    return share


@dataclass(frozen=True)
class StepMetrics:
    """Figures of the global batch of one call, the same on every rank; on request, log-probs of
    this replica's rows."""

    # Mean over the supervised tokens by their weights, 0 where there are none; or their sum over
    # the divisor that was given.
    loss: float
    num_tokens: int  # supervised; optim_step applies nothing where no call had any
    log_probs: list[Tensor] | None = None  # per row [S], as `forward` returns them
    # What the loss reports, over the same; and with experts `expert_load`, see
    # training/expert_routing.py, and of model.router_balance_loss and router_z_loss the losses
    # without these coefficients.
    means: dict[str, float] = field(default_factory=dict)
    # With experts: the tokens of each [layers with experts, experts]. A controller does not get it.
    expert_load_LE: Tensor | None = None


@dataclass(frozen=True)
class LossCall:
    """What a forward_backward is asked for, beside its batch; see MegatronWorker."""

    per_token: bool = False  # log-probs on the host of every rank
    loss: str | LossFunction = "cross_entropy"
    divisor: float | None = None  # of the summed loss; None: the weights of the supervised tokens
    accumulate: bool = False  # add to the gradients there are
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Backward:
    """A forward_backward of one model on this rank, ready to be done."""

    stage: Stage
    gradients: Gradients
    model: ModelConfig
    batches: Sequence[MicroBatch]
    step: ForwardStep
    objective: Objective
    asked: LossCall

    def totals(self, outputs: Sequence[Any]) -> tuple[float, int, dict[str, float]]:
        """Of what the last stage reports: the loss and the supervised tokens of the global batch,
        and means. What the schedule has divided the gradients by is put right."""
        loss_sum, count, weight, means = totals(
            self.objective, self.batches, outputs, self.stage.grid, self.stage.device
        )
        divided_by = self.asked.divisor or weight or 1.0
        if count not in (0, divided_by):  # Megatron has divided by the count
            self.gradients.scale(count / divided_by)
        self.gradients.took(len(self.batches), count)
        return loss_sum / divided_by, count, means

    def metrics(
        self,
        outputs: Sequence[Any],
        found: tuple[float, int, dict[str, float]],
        losses: RouterLosses | None,
    ) -> StepMetrics:
        """What the caller gets to know."""
        loss, count, means = found
        log_probs = None
        if self.asked.per_token:
            pieces = [out["log_probs_N"] for out in outputs]
            log_probs = self.stage.per_row(self.batches, pieces)
        stage = self.stage
        load_LE = take_expert_load(stage.chunks, stage.sizes.text, stage.device)
        means |= values_of(losses) | ({} if load_LE is None else {"expert_load": busiest(load_LE)})
        return StepMetrics(loss, count, log_probs, means, load_LE)


def run_backward(asked: Sequence[Backward]) -> list[StepMetrics]:
    """Do what is asked for, of different models of one layout, in one pass through the pipeline. A
    collective. After an error all gradients are those of the calls before."""
    with ExitStack() as calls:
        for each in asked:
            each.stage.train(True)
            calls.enter_context(each.gradients.of_call(each.asked.accumulate))
        losses = [
            router_losses(each.model, each.stage, each.batches, each.step, each.asked.divisor)
            for each in asked
        ]
        steps = [with_losses(each.step, of_it) for each, of_it in zip(asked, losses, strict=True)]
        if len(asked) == 1:
            outputs = [asked[0].stage.run(asked[0].batches, steps[0], forward_only=False)]
        else:
            stages, batches = [each.stage for each in asked], [each.batches for each in asked]
            outputs = run_together(stages, batches, steps)
        found = [each.totals(out) for each, out in zip(asked, outputs, strict=True)]
        every = zip(asked, outputs, found, losses, strict=True)
        return [each.metrics(out, of_it, routers) for each, out, of_it, routers in every]
