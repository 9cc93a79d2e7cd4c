"""Which stage gets how many decoder layers: the fastest split that fits into memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_vlm.config.schema import Config, ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.hardware import Machine
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.planner.pipeline_time import ReplicaCosts, Split
from megatron_vlm.planner.row_sizes import BatchSizes, Step

_ROUNDS = 100


def step_seconds(replicas: Sequence[Sequence[ReplicaCosts]], split: Split) -> float:
    """The pipeline's time, summed over steps; each step waits for its slowest replica."""
    return sum(max(replica.stages(split).seconds for replica in step) for step in replicas)


def replicas_of(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    steps: Sequence[Step],
    machine: Machine,
    itemsize: int,
) -> list[list[ReplicaCosts]]:
    """Each step's replicas that have anything to do; those that share experts as one."""
    found = []
    for step in steps:
        groups = [step[first : first + dims.ep] for first in range(0, len(step), dims.ep)]
        shares = [[share for share in group if share] for group in groups]
        found.append(
            [
                ReplicaCosts.together(
                    [ReplicaCosts.of(cfg, sizes, dims, each, machine, itemsize) for each in group]
                )
                for group in shares
                if group
            ]
        )
    return found


def choose_layer_split(
    replicas: Sequence[Sequence[ReplicaCosts]], most: Split, even: Split
) -> Split:
    """The split with the fastest steps, of those with at most `most` layers on each stage. Never
    slower than the even one, where that fits."""
    fits = all(count <= limit for count, limit in zip(even, most, strict=True))
    candidates = [level_layers(replicas, most, sum(even)), *([even] if fits else [])]
    best, seconds = _fastest(replicas, candidates)
    for _ in range(_ROUNDS):  # one layer from one stage to another, as long as that gains
        tried, faster = _fastest(replicas, list(_neighbours(best, most)) or [best])
        if faster >= seconds * (1 - 1e-9):
            break
        best, seconds = tried, faster
    return best


def even_split(pp: int, layers: int) -> Split:
    """What a run without parallel.layers_per_stage has."""
    return ParallelDims.create(ParallelConfig(pp=pp), pp, layers).layers_per_stage


def most_layers(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    batches: Sequence[BatchSizes],
    itemsize: int,
    limit: float | None,
) -> Split | None:
    """How many layers each stage has memory for at these degrees; None where that is too few for
    the model."""
    pp, layers = dims.pp, sizes.text.layers
    if limit is None:
        return (layers,) * pp

    def need(stage: int, count: int) -> int:
        split = [0] * pp
        split[stage] = count
        split[stage - 1] += layers - count  # so that features arrive as they would
        tried = replace(dims, layers_per_stage=tuple(split))
        return stage_memory(cfg, sizes, tried, stage, batches, itemsize).total

    found = tuple(
        _largest(lambda count: need(stage, count) <= limit, layers)  # noqa: B023 - called at once
        for stage in range(pp)
    )
    enough = sum(found) >= layers and min(found) >= 0 and all(found[1:])
    return found if enough else None


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; -1 where none does. What fits once fits below."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def level_layers(replicas: Sequence[Sequence[ReplicaCosts]], most: Split, layers: int) -> Split:
    """The slowest stage as fast as can be, over all micro-batches: each layer goes where the time
    is then least."""
    everyone = [replica for step in replicas for replica in step]
    layer, first, last = (
        sum(float(getattr(replica, f"{part}_G2").sum()) for replica in everyone)
        for part in ("layer", "first", "last")
    )
    times = [0.0] * len(most)
    times[0] += first
    times[-1] += last
    split = [int(stage > 0) for stage in range(len(most))] if len(most) > 1 else [0]
    for _ in range(layers - sum(split)):
        open_stages = [stage for stage, count in enumerate(split) if count < most[stage]]
        least = min(open_stages, key=lambda s: (times[s] + (split[s] + 1) * layer, s))
        split[least] += 1
    return tuple(split)


def _neighbours(split: Split, most: Split) -> list[Split]:
    found = []
    for giver in range(len(split)):
        if split[giver] <= int(giver > 0):
            continue
        for taker in range(len(split)):
            if taker != giver and split[taker] < most[taker]:
                moved = list(split)
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
                found.append(tuple(moved))
    return found


def _fastest(
    replicas: Sequence[Sequence[ReplicaCosts]], splits: Sequence[Split]
) -> tuple[Split, float]:
    seconds = [(step_seconds(replicas, split), split) for split in splits]
    best = min(seconds)
    return best[1], best[0]
