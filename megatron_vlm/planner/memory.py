"""Memory that a rank of each stage needs, before anything is loaded.

Weights, gradients and optimizer state are exact. For activations see activation_memory.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.config.objectives import reference_of
from megatron_vlm.config.optimizer_spec import OFFLOAD_BUCKET, optimizer_spec
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.block_weight import DECODED_AT_ONCE
from megatron_vlm.planner.activation_memory import activations, offloaded_activations, working_bytes
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.parameters import ParamCounts, count, largest_in_blocks
from megatron_vlm.planner.row_sizes import BatchSizes

USABLE = 0.9  # fraction of a device's memory; the rest is for kernels' workspaces and fragmentation
_FP32 = 4
_GIB = 2**30


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one rank of a stage needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward of all micro-batches in flight
    working: int = 0  # temporary within one micro-batch
    host: int = 0  # in the memory of the host instead

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.fixed + self.activations + self.working

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the data."""
        return self.weights + self.gradients + self.optimizer


def estimate(layout: ModelLayout, batches: Sequence[BatchSizes]) -> list[StageMemory]:
    """Return the estimate of each stage. `batches`: micro-batches of a step on a replica."""
    return [stage_memory(layout, stage, batches) for stage in range(layout.dims.pp)]


def stage_memory(layout: ModelLayout, stage: int, batches: Sequence[BatchSizes]) -> StageMemory:
    """Return the estimate of one stage."""
    cfg, dims, counts = layout.cfg, layout.dims, count(layout, stage)
    optimizer, host = _optimizer_memory(layout, counts)
    kept_by_chunk, host_by_chunk, working, distinct = [], [], [], set(batches)
    for chunk in range(dims.virtual_stages):
        place = dims.place_of(stage, chunk)
        kept = {each: activations(layout, place, each) for each in distinct}
        on_host = {each: offloaded_activations(layout, place, each) for each in distinct}
        kept_by_chunk.append([kept[each] for each in batches])
        host_by_chunk.append([on_host[each] for each in batches])
        working += [working_bytes(layout, place, each) for each in distinct]
    in_flight = micro_batches_in_flight(dims, stage, len(batches))
    models = 2 if reference_of(cfg) == "model" else 1  # the second one is frozen
    return StageMemory(
        counts.weight_bytes(cfg.lora.base, layout.itemsize) * models,
        _FP32 * counts.gradients,
        optimizer,
        _peak(kept_by_chunk, in_flight),
        max(working, default=0) + _decoded_bytes(layout),
        host + _peak(host_by_chunk, in_flight),
    )


def _optimizer_memory(layout: ModelLayout, counts: ParamCounts) -> tuple[int, int]:
    """Return the bytes of a rank's fp32 main weights and states, on the device and on the host.
    Weights of the model in fp32 are their own main weights, unless those are on the host."""
    optim, itemsize = layout.cfg.optim, layout.itemsize
    on_host = math.ceil(optim.offload * counts.optimized)
    states = optimizer_spec(optim).bytes_of_state * counts.states
    main_bytes = 0 if itemsize == _FP32 else _FP32
    buckets = 2 * min(on_host, OFFLOAD_BUCKET) * (_FP32 + itemsize)  # gradients and weights
    return (
        int(main_bytes * (counts.optimized - on_host) + (1 - optim.offload) * states),
        int(_FP32 * on_host + optim.offload * states) + buckets,
    )


def _peak(bytes_by_chunk: Sequence[Sequence[int]], in_flight: set[tuple[int, ...]]) -> int:
    """Return the maximum of bytes for micro-batches in flight, if the largest ones meet."""
    largest = [sorted(each, reverse=True) for each in bytes_by_chunk]
    return max(
        sum(sum(each[:number]) for each, number in zip(largest, numbers, strict=True))
        for numbers in in_flight
    )


def _decoded_bytes(layout: ModelLayout) -> int:
    """Return the temporary bytes of a product with a weight of lora.base: its values, and the fp32
    values and numbers of the codes of a part of it."""
    values = largest_in_blocks(layout)
    return values * layout.itemsize + min(values, DECODED_AT_ONCE) * (_FP32 + _FP32 // 2)


def micro_batches_in_flight(dims: ParallelDims, stage: int, batches: int) -> set[tuple[int, ...]]:
    """Return the numbers of micro-batches that the chunks of a stage keep at once, at each point
    where Megatron's schedule turns from a forward to a backward."""
    pp, chunks = dims.pp, dims.virtual_stages
    # Groups of pp micro-batches each pass all chunks. Fillers complete the last group.
    order = [chunk for _ in range(-(-batches // pp)) for chunk in range(chunks) for _ in range(pp)]
    back = [chunks - 1 - chunk for chunk in order]
    ahead = pp - stage - 1  # forwards before the first backward
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * pp
    in_flight_by_point = set()
    for done in range(max(min(len(order) - ahead, 2 * pp * chunks), 1)):
        started, finished = order[: ahead + done + 1], back[:done]
        kept = (started.count(chunk) - finished.count(chunk) for chunk in range(chunks))
        in_flight_by_point.add(tuple(kept))
    return in_flight_by_point


def host_need(dims: ParallelDims, stages: Sequence[StageMemory], devices: int) -> int:
    """Return the bytes of the ranks of the fullest machine, which has so many neighbouring ones."""
    of_rank = [stages[dims.stage_of(rank)].host for rank in range(dims.world_size)]
    return max(sum(of_rank[first:][:devices]) for first in range(0, len(of_rank), devices))


def check_offload(layout: ModelLayout, devices: int, memory: float) -> None:
    """Refuse an offloaded optimizer that needs more than the memory of a machine with `devices`."""
    offload, dims = layout.cfg.optim.offload, layout.dims
    if not offload:
        return
    need = host_need(dims, estimate(layout, []), devices)
    if need > USABLE * memory:
        ranks = min(devices, dims.world_size)
        raise ConfigError(
            f": main weights and moments of {ranks} rank{'s' * (ranks > 1)} need "
            f"{need / _GIB:,.1f} GiB of host memory, and {USABLE:.0%} of the {memory / _GIB:,.1f} "
            "GiB of their machine can be used",
            key="optim.offload",
            found=offload,
            remedy="lower it, set optim.states=int8, or use more machines with "
            "parallel.distributed_optimizer=true",
        )
