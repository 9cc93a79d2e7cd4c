"""Number of decoder layers on each stage: the fastest split that fits into memory."""

from collections.abc import Callable, Iterator, Sequence

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.planner.hardware import Machine
from megatron_vlm.planner.layout import ModelLayout, Split
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.planner.pipeline_time import ReplicaCosts
from megatron_vlm.planner.row_sizes import BatchSizes, Step

Replicas = Sequence[Sequence[ReplicaCosts]]  # for each step
_ROUNDS = 100


def step_seconds(replicas: Replicas, split: Split) -> float:
    """Return the pipeline's time, summed over steps. Each step waits for its slowest replica."""
    return sum(max(replica.stages(split).seconds for replica in step) for step in replicas)


def replicas_of(layout: ModelLayout, steps: Sequence[Step], machine: Machine) -> Replicas:
    """Return the replicas with work for each step. Replicas that share experts count as one."""

    def costs(shares: Sequence[list[BatchSizes]]) -> list[ReplicaCosts]:
        return [ReplicaCosts.at_degrees(layout, share, machine) for share in shares if share]

    ep = layout.dims.ep
    groups = [[costs(step[at : at + ep]) for at in range(0, len(step), ep)] for step in steps]
    return [[ReplicaCosts.together(each) for each in step if each] for step in groups]


def choose_layer_split(replicas: Replicas, limits: Split, even: Split) -> Split:
    """Return the split with the fastest steps among those with at most `limits` layers on
    each stage. It is never slower than the even split, if that fits."""
    fits = all(count <= limit for count, limit in zip(even, limits, strict=True))
    candidates = [level_layers(replicas, limits, sum(even)), *([even] if fits else [])]
    best, seconds = _fastest_split(replicas, candidates)
    for _ in range(_ROUNDS):  # move one layer from one stage to another, as long as that is faster
        others = _neighbours(best, limits) or [best]
        candidate, candidate_s = _fastest_split(replicas, others)
        if candidate_s >= seconds * (1 - 1e-9):
            break
        best, seconds = candidate, candidate_s
    return best


def even_split(pp: int, layers: int) -> Split:
    """Return the split of a run without parallel.layers_per_stage."""
    return ParallelDims.create(ParallelConfig(pp=pp), pp, layers).layers_per_stage


def most_layers(
    layout: ModelLayout, batches: Sequence[BatchSizes], limit: float | None
) -> Split | None:
    """Return how many layers each stage has memory for at these degrees, whichever layers they are,
    or None if that is too few for the model."""
    text, pp = layout.sizes.text, layout.dims.pp
    layers, kinds = text.num_layers, text.kind_of
    if limit is None:
        return (layers,) * pp

    def need(stage: int, count: int) -> int:
        trials = map(layout.with_layers, _splits_with(stage, count, pp, kinds))
        return max(stage_memory(trial, stage, batches).total for trial in trials)

    if pp == 1:
        return (layers,) if need(0, layers) <= limit else None
    max_layers = tuple(
        _largest_fitting(lambda count: need(stage, count) <= limit, layers)  # noqa: B023 - called at once
        for stage in range(pp)
    )
    is_enough = sum(max_layers) >= layers and min(max_layers) >= 0 and all(max_layers[1:])
    return max_layers if is_enough else None


def _splits_with(stage: int, count: int, pp: int, kinds: Sequence[int]) -> Iterator[Split]:
    """Yield splits in which a stage has `count` layers: one for each number of layers of each kind
    that it may get. The stage before it has all layers before these, so that features arrive as
    they would. `kinds`: the kind of each layer of the model."""
    rest, seen = len(kinds) - count, set()
    starts = [rest] if stage else [0]
    if 0 < stage < pp - 1:
        starts = list(range(rest, -1, -1))
    for start in starts:
        taken = kinds[start : start + count]
        if (mix := tuple(map(taken.count, range(max(kinds) + 1)))) in seen:
            continue
        seen.add(mix)
        split = [0] * pp
        split[stage] += count
        split[stage - 1] += start
        split[-1] += rest - start
        yield tuple(split)


def _largest_fitting(fits: Callable[[int], bool], maximum: int) -> int:
    """Return the largest number up to `maximum` that fits, as smaller ones do; -1 if none."""
    low, high = -1, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def level_layers(replicas: Replicas, limits: Split, layers: int) -> Split:
    """Return the split whose slowest stage is fastest over all micro-batches. Each layer is added
    to the stage that then takes the least time."""
    all_replicas = [replica for step in replicas for replica in step]
    first, last = (
        sum(float(getattr(replica, f"{part}_G2").sum()) for replica in all_replicas)
        for part in ("first", "last")
    )
    layer = sum(replica.mean_layer_seconds for replica in all_replicas)
    times = [0.0] * len(limits)
    times[0] += first
    times[-1] += last
    split = [int(stage > 0) for stage in range(len(limits))]
    for _ in range(layers - sum(split)):
        room = [stage for stage, count in enumerate(split) if count < limits[stage]]
        fastest = min(room, key=lambda s: (times[s] + (split[s] + 1) * layer, s))
        split[fastest] += 1
    return tuple(split)


def _neighbours(split: Split, limits: Split) -> list[Split]:
    splits = []
    for source in range(len(split)):
        if split[source] <= int(source > 0):
            continue
        for target in range(len(split)):
            if target != source and split[target] < limits[target]:
                neighbour = list(split)
                neighbour[source], neighbour[target] = neighbour[source] - 1, neighbour[target] + 1
                splits.append(tuple(neighbour))
    return splits


def _fastest_split(replicas: Replicas, splits: Sequence[Split]) -> tuple[Split, float]:
    seconds, best = min((step_seconds(replicas, split), split) for split in splits)
    return best, seconds
