"""forward_backward on this rank: the schedule, the division, and the metrics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.training.expert_routing import (
    busiest_expert_ratio,
    take_expert_load,
    take_rerouted,
)
from megatron_vlm.training.losses import LossFunction, Objective, totals
from megatron_vlm.training.pipeline import ForwardStep, Stage
from megatron_vlm.training.router_losses import RouterTerms
from megatron_vlm.training.row_scores import gather_targets, rows_by_place

# The gradients of this rank live from one step of the optimizer to the next. They come from one
# call, or are the sum of several.
#
# Megatron ends every backward with operations that must run only once: it reduces the buffers over
# the replicas, adds up tied embeddings over the stages, and divides. So the gradients of earlier
# calls are stored separately while a call computes, and are added after it.


class Gradients:
    """Contents of Megatron's gradient buffers between two calls."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer):
        self.chunks, self.optimizer = list(chunks), optimizer
        self.some = False  # whether they include a supervised token of a global batch
        self.micro_batches = 0  # micro-batches of this replica that they include
        self.calls = 0  # calls that were ever completed

    @contextmanager
    def of_call(self, add: bool) -> Iterator[None]:
        """Run a backward over empty buffers. In the end they hold its gradients, and with `add`
        also earlier calls'. After an error they hold the earlier calls' with `add`, and are empty
        without it."""
        add = add and self.some
        earlier = [part.clone() for part in self._reduced_parts()] if add else []
        earlier_micro_batches = self.micro_batches
        self.clear()
        if add:
            self.micro_batches = earlier_micro_batches
        try:
            yield
        except BaseException:
            self.clear()
            for part, earlier_part in zip(self._reduced_parts(), earlier, strict=add):
                part.copy_(earlier_part)
            self.some, self.micro_batches = add, earlier_micro_batches if add else 0
            raise
        for part, earlier_part in zip(self._reduced_parts(), earlier, strict=add):
            part.add_(earlier_part)
        self.some = self.some or add
        self.calls += 1

    def scale(self, factor: float) -> None:
        """Multiply the gradients of the call by a number."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def clear(self) -> None:
        """Empty the buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forget()

    def forget(self) -> None:
        """Mark the gradients as spent or useless: the next call starts without them."""
        self.some, self.micro_batches = False, 0

    def _reduced_parts(self) -> list[Tensor]:
        """Return the parts of the buffers that are reduced over the replicas: all of them, or this
        replica's share of each bucket if the optimizer is sharded."""
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
    """Metrics of one call for the global batch, the same on every rank. On request, they have the
    log-probs of this replica's rows."""

    # The loss is the weighted mean over the supervised tokens, or 0 if there are none. With a
    # divisor it is the sum of the tokens' losses over that divisor.
    loss: float
    num_tokens: int  # supervised tokens; optim_step applies nothing if no call had any
    log_probs: list[Tensor] | None = None  # [S] for each row, as `forward` returns them
    # The means of the loss's reports are over the same tokens. Models with experts add
    # `expert_load`, see training/expert_routing.py, and the losses of model.router_balance_loss and
    # router_z_loss without these coefficients.
    means: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossCall:
    """Arguments of a forward_backward in addition to its batch; see MegatronWorker."""

    per_token: bool = False  # return log-probs on the host of every rank
    loss: str | LossFunction = "cross_entropy"
    divisor: float | None = None  # divides the summed loss; None: the supervised tokens' weights
    accumulate: bool = False  # add to the existing gradients
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Backward:
    """A forward_backward of one model on this rank, ready to run."""

    stage: Stage
    gradients: Gradients
    batches: Sequence[MicroBatch]
    step: ForwardStep
    objective: Objective
    call: LossCall
    router: RouterTerms | None = None  # losses of the routers, which look ahead

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run in training mode, with gradients of this call alone."""
        self.stage.train(True)
        with self.gradients.of_call(self.call.accumulate):
            yield

    def forward_step(self) -> ForwardStep:
        """Return the step of a micro-batch, with the losses of the routers. A collective."""
        return self.step if self.router is None else self.router.added_to(self.step)

    def totals(self, outputs: Sequence[Any]) -> tuple[float, int, dict[str, float]]:
        """Return the loss and the supervised tokens of the global batch, and means. Also correct
        the schedule's division of the gradients."""
        loss_sum, count, weight, means = totals(
            self.objective, self.batches, outputs, self.stage.grid, self.stage.device
        )
        divided_by = self.call.divisor or weight or 1.0
        if count not in (0, divided_by):  # Megatron has divided by the count
            self.gradients.scale(count / divided_by)
        self.gradients.micro_batches += len(self.batches)
        self.gradients.some = self.gradients.some or count > 0
        return loss_sum / divided_by, count, means

    def metrics(
        self, outputs: Sequence[Any], sums: tuple[float, int, dict[str, float]]
    ) -> StepMetrics:
        """Return the metrics for the caller."""
        (loss, count, means), stage = sums, self.stage
        log_probs = None
        if self.call.per_token:
            pieces = [out["log_probs_N"] for out in outputs]
            pieces_M = gather_targets(stage, self.batches, pieces)
            by_row = map(MicroBatch.log_probs_by_row, self.batches, pieces_M)
            log_probs = rows_by_place(self.batches, by_row)
        rerouted = take_rerouted(stage.chunks, stage.sizes.text, stage.device)
        load_LE = take_expert_load(stage.chunks, stage.sizes.text, stage.device)
        if self.router is not None:
            means |= self.router.values()
        if load_LE is not None:
            means["expert_load"] = busiest_expert_ratio(load_LE)
        if rerouted is not None:
            means["rerouted"] = rerouted
        return StepMetrics(loss, count, log_probs, means)


def run_backward(request: Backward) -> StepMetrics:
    """Run the request. A collective. After an error the gradients are the earlier calls'."""
    with request.computing():
        step = request.forward_step()
        outputs = request.stage.run(request.batches, step, forward_only=False)
        return request.metrics(outputs, request.totals(outputs))
