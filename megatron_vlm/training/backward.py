"""forward_backward on this rank: the schedule, the division, and the metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.training.expert_routing import routing_means, take_counts
from megatron_vlm.training.losses import LossFunction, Objective, Totals, totals
from megatron_vlm.training.mtp_loss import MtpTerm
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
        self.deferred: list[DeferredFigures] = []  # metrics of the calls that they include

    @contextmanager
    def of_call(self, add: bool) -> Iterator[None]:
        """Run a backward over empty buffers. In the end they hold its gradients, and with `add`
        also earlier calls'. After an error they hold the earlier calls' with `add`, and are empty
        without it."""
        add = add and self.some
        earlier = [part.clone() for part in self._reduced_parts()] if add else []
        earlier_micro_batches, earlier_deferred = self.micro_batches, self.deferred
        self.clear()
        if add:
            self.micro_batches, self.deferred = earlier_micro_batches, earlier_deferred
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
        self.some, self.micro_batches, self.deferred = False, 0, []

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
    log-probs of this replica's rows. The host waits for the loss and the means where it first uses
    one of them, or in optim_step, which waits for the norm."""

    # The loss is the weighted mean over the supervised tokens, or 0 if there are none. With a
    # divisor it is the sum of the tokens' losses over that divisor.
    loss: float
    num_tokens: int  # supervised tokens; optim_step applies nothing if no call had any
    log_probs: list[Tensor] | None = None  # [S] for each row, as `forward` returns them
    # The means of the loss's reports are over the same tokens. Models with experts add
    # `expert_load`, see training/expert_routing.py, and the losses of model.router_balance_loss and
    # router_z_loss without these coefficients. An MTP head that is trained adds the figures
    # of training/mtp_loss.py.
    means: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def deferred(
        num_tokens: int,
        log_probs: list[Tensor] | None,
        read: Callable[[], tuple[float, dict[str, float]]],
    ) -> "StepMetrics":
        """Return metrics that `read` their loss and means at first use."""
        metrics = object.__new__(StepMetrics)
        vars(metrics).update(num_tokens=num_tokens, log_probs=log_probs, read=read)
        return metrics

    if not TYPE_CHECKING:  # mypy knows the attributes

        def __getattr__(self, name: str) -> Any:
            if name not in ("loss", "means") or "read" not in vars(self):
                raise AttributeError(name)
            loss, means = vars(self).pop("read")()
            vars(self).update(loss=loss, means=means)
            return vars(self)[name]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Send floats to another process, not tensors on this device."""
        return StepMetrics, (self.loss, self.num_tokens, self.log_probs, self.means)


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
    terms: Sequence[RouterTerms | MtpTerm] = ()  # losses of routers and of an MTP head

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run in training mode, with gradients of this call alone."""
        self.stage.train(True)
        with self.gradients.of_call(self.call.accumulate):
            yield

    def forward_step(self) -> ForwardStep:
        """Return the step of a micro-batch, with all losses. A collective."""
        return reduce(lambda step, term: term.added_to(step), self.terms, self.step)

    def totals(self, outputs: Sequence[Any]) -> Totals:
        """Return the totals of the global batch, and correct how the schedule divided gradients."""
        of = self.objective, self.batches, outputs, self.stage.grid, self.stage.device
        done, gradients = totals(*of, self.call.divisor), self.gradients
        if done.count not in (0, done.divisor):  # Megatron has divided by the count
            gradients.scale(done.count / done.divisor)
        gradients.micro_batches += len(self.batches)
        gradients.some = gradients.some or done.count > 0
        return done

    def metrics(self, outputs: Sequence[Any], done: Totals) -> StepMetrics:
        """Return the metrics for the caller."""
        stage, log_probs = self.stage, None
        if self.call.per_token:
            pieces = [out["log_probs_N"] for out in outputs]
            pieces_M = gather_targets(stage, self.batches, pieces)
            by_row = map(MicroBatch.log_probs_by_row, self.batches, pieces_M)
            log_probs = rows_by_place(self.batches, by_row)
        counts = take_counts(stage.chunks, stage.sizes.text, stage.device)
        terms = {term.names: term.values() for term in self.terms}
        routed = () if counts is None else (counts,)
        self.gradients.deferred += [done.sums, *terms.values(), *routed]

        def read() -> tuple[float, dict[str, float]]:
            means = done.means
            for names, figures in terms.items():
                means |= dict(zip(names, figures.values, strict=True))
            if counts is not None:
                means |= routing_means(counts, stage.sizes.text)
            return done.loss, means

        return StepMetrics.deferred(done.count, log_probs, read)


def run_backward(request: Backward) -> StepMetrics:
    """Run the request. A collective. After an error the gradients are the earlier calls'."""
    with request.computing():
        step = request.forward_step()
        outputs = request.stage.run(request.batches, step, forward_only=False)
        return request.metrics(outputs, request.totals(outputs))
