"""Collectives of the replicas behind other work: gradients are reduced while a backward still runs,
new weights are gathered while the next forward begins.

Megatron begins each as a bucket of parameters is complete, or as a module needs it. But a replica
whose micro-batch has no images does not run the tower, and comes to another order than one whose
micro-batch has some: they would wait for each other. So both have one order here, on all replicas.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn


class GradReduce:
    """The reductions of a chunk: each begins when its bucket and those before it are complete."""

    def __init__(self, chunk: DistributedDataParallel) -> None:
        self.order = list(reversed(_forward_order(chunk)))  # backward goes the other way
        self.begin = {group: group.start_grad_sync for group in self.order}
        self.complete: set[Any] = set()
        self.begun = 0
        for group in self.order:
            group.start_grad_sync = partial(self._add, group)

    def _add(self, group: Any, force_all_reduce: bool = False) -> None:
        self.complete.add(group)
        for first in self.order[self.begun :]:
            if first not in self.complete:
                break
            self.begin[first](force_all_reduce=force_all_reduce)
            self.begun += 1

    def begin_first(self) -> None:
        """In the first step of all Megatron learns which gradients come, and none has begun."""
        for group in self.order:
            if group.is_first_batch:
                self._add(group)

    def end(self) -> None:
        """The step's reductions are done."""
        self.complete.clear()
        self.begun = 0


class WeightGather:
    """The gathers after a step of the distributed optimizer, for which each part of the model
    waits when it runs. Without chunks, those of an optimizer that gathers for itself."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.pending: list[Any] = []
        self.groups: list[Any] = []
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            self.groups += _forward_order(chunk)
            for part in _parts(chunk.module):
                wait = partial(self._wait, _groups_of(chunk, part))
                runs = _before_head(chunk.module, part) or part
                runs.register_forward_pre_hook(lambda *_, wait=wait: wait())

    def start(self) -> None:
        """Begin to gather what the step has computed."""
        assert not self.pending
        for group in self.groups:
            group.start_param_sync()
        self.pending = list(self.groups)

    def finish(self) -> None:
        """Wait for all: before anything but a forward reads or changes weights."""
        self._wait(self.pending)

    def _wait(self, groups: Sequence[Any]) -> None:
        for group in groups:
            if group in self.pending:
                group.start_param_sync(force_sync=True)  # which waits for one that has begun
        self.pending = [group for group in self.pending if group not in groups]


def _parts(model: Any) -> Iterator[nn.Module]:
    """The parts of a chunk in the order of a forward. They have all of its parameters."""
    for name in ("embedding", "vision_model"):
        if hasattr(model, name):
            yield getattr(model, name)
    yield from model.decoder.layers
    for part in (model.decoder.final_layernorm, getattr(model, "output_layer", None)):
        if part is not None:
            yield part


def _before_head(model: Any, part: nn.Module) -> nn.Module | None:
    """What runs before the head, where that is the part: most of what the head does is no forward
    of its layer (model/log_probs.py)."""
    is_head = part is getattr(model, "output_layer", None)
    return model.decoder.final_layernorm if is_head else None


def _groups_of(chunk: DistributedDataParallel, part: nn.Module) -> list[Any]:
    """Megatron's groups of buckets that hold a part; frozen parameters are in none."""
    found = (chunk.param_to_bucket_group.get(param) for param in part.parameters())
    return list(dict.fromkeys(group for group in found if group is not None))


def _forward_order(chunk: DistributedDataParallel) -> list[Any]:
    """The groups of a chunk, in the order in which a forward first needs them."""
    groups = [group for part in _parts(chunk.module) for group in _groups_of(chunk, part)]
    order = list(dict.fromkeys(groups))
    every = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    assert set(order) == set(every), "a part of the model is missing in _parts"
    return order
