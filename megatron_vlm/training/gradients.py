"""The gradients of this rank from one step of the optimizer to the next: those of one call, or the
sum of several.

Megatron ends every backward with what may be done once: it reduces the buffers over the replicas,
adds up tied embeddings over the stages, and divides. So what earlier calls gave waits apart while a
call computes, and is added when that is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


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
