"""Data parallelism: wrapping of the model, reduction and the one normalisation of the gradients.
Collectives overlap with other work: gradients are reduced during a backward, and new weights are
gathered while the next forward starts.

Megatron starts each collective when a bucket is complete, or when a module needs it. But a replica
whose micro-batch has no images does not run the tower, so its order differs, and replicas would
wait for each other. Here all have the same order.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from torch import Tensor, nn

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import overlaps, shards_optimizer
from megatron_vlm.distributed.grid import GroupAxis, RankGroups
from megatron_vlm.model.stage_model import StageModel


def wrap_data_parallel(
    cfg: Config, chunks: Sequence[StageModel], grid: RankGroups
) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DDP, with fp32 gradient buffers."""
    reduces_early, gathers_late = overlaps(cfg.parallel, grid.dp.size)
    wrapped = [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=reduces_early,
                overlap_param_gather=gathers_late,
                use_distributed_optimizer=shards_optimizer(cfg.parallel, grid.dp.size),
            ),
            module=chunk,
        )
        for chunk in chunks
    ]
    # Megatron's schedules find these hooks on the model's config, which all chunks share.
    config = chunks[0].config
    reduces = [GradReduce(chunk) for chunk in wrapped if reduces_early]
    config.finalize_model_grads_func = partial(finalize_grads, grid, reduces)
    if reduces_early:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def finalize_grads(
    grid: RankGroups,
    reduces: "Sequence[GradReduce]",
    chunks: list[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    **kwargs: object,
) -> None:
    """Run Megatron's reductions, one of which sums the gradients of a tied embedding over the first
    and the last stage; divide by the global token count; then reduce the tower's."""
    for reduce in reduces:
        reduce.begin_first()
    megatron_finalize(chunks, **kwargs)
    if num_tokens is not None:  # Megatron would divide by it, too, but wait to see that it is not 0
        grid.from_last_stage(num_tokens)
        dist.all_reduce(num_tokens, group=grid.dp.group)
        for chunk in chunks:
            chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
    for reduce in reduces:
        reduce.end()
    all_reduce_tower_grads(chunks[0].module, grid.tp)


def all_reduce_tower_grads(model: StageModel, tp: GroupAxis) -> None:
    """Sum the tower's gradients over TP, where each TP rank encoded only its own images."""
    if not (model.pre_process and model.share_images) or tp.size == 1:
        return
    works = [
        dist.all_reduce(
            param.main_grad,  # type: ignore[attr-defined]
            group=tp.group,
            async_op=True,
        )
        for param in model.vision_model.parameters()
        if param.requires_grad
    ]
    for work in works:
        work.wait()


class GradReduce:
    """Gradient reductions of a chunk. Each starts when all buckets up to its own are complete."""

    def __init__(self, chunk: DistributedDataParallel) -> None:
        self.order = list(reversed(_forward_order(chunk)))  # backward has the opposite order
        # Megatron's own, taken before the loop below puts `_add` in its place.
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
        """Start the first step's reductions: Megatron is still learning which gradients exist."""
        for group in self.order:
            if group.is_first_batch:
                self._add(group)

    def end(self) -> None:
        """Reset after the step's reductions."""
        self.complete.clear()
        self.begun = 0


class WeightGather:
    """Weight gathers after a step of the distributed optimizer. A part of the model waits for its
    own when it runs. Without chunks the optimizer gathers by itself."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.pending: list[Any] = []
        self.groups: list[Any] = []
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            self.groups += _forward_order(chunk)
            for part in _parts(chunk.module):
                wait = partial(self._wait, _groups_of(chunk, part))
                # Most of the head's work is not a forward of its layer (model/head.py).
                is_head = part is getattr(chunk.module, "output_layer", None)
                hooked = chunk.module.decoder.final_layernorm if is_head else part
                hooked.register_forward_pre_hook(lambda *_, wait=wait: wait())

    def start(self) -> None:
        """Start to gather the weights that the step has computed."""
        assert not self.pending
        for group in self.groups:
            group.start_param_sync()
        self.pending = list(self.groups)

    def finish(self) -> None:
        """Wait for all gathers, before anything but a forward reads or changes weights."""
        self._wait(self.pending)

    def _wait(self, groups: Sequence[Any]) -> None:
        for group in groups:
            if group in self.pending:
                group.start_param_sync(force_sync=True)  # waits for a gather that has started
        self.pending = [group for group in self.pending if group not in groups]


def _parts(model: Any) -> Iterator[nn.Module]:
    """Yield the parts of a chunk in the order of a forward. They contain all of its parameters."""
    for name in ("embedding", "vision_model"):
        if hasattr(model, name):
            yield getattr(model, name)
    yield from model.decoder.layers
    after = (getattr(model, name, None) for name in ("output_layer", "mtp_head"))
    yield from (part for part in (model.decoder.final_layernorm, *after) if part is not None)


def _groups_of(chunk: DistributedDataParallel, part: nn.Module) -> list[Any]:
    """Return Megatron's groups of buckets that hold a part. Frozen parameters are in no group."""
    groups = (chunk.param_to_bucket_group.get(param) for param in part.parameters())
    return list(dict.fromkeys(group for group in groups if group is not None))


def _forward_order(chunk: DistributedDataParallel) -> list[Any]:
    """Return the groups of a chunk in the order in which a forward first needs them."""
    groups = [group for part in _parts(chunk.module) for group in _groups_of(chunk, part)]
    order = list(dict.fromkeys(groups))
    all_groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    assert set(order) == set(all_groups), "a part of the model is missing in _parts"
    return order
