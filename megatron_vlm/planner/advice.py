"""The layouts that fit, and where none does, the changes to make, each with its numbers.

`megatron-vlm plan --fit` asks for sets of memory switches, the fastest first. A search over layouts
chooses recomputation and micro-batches by itself; here it is repeated for each combination of the
switches that it leaves alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_vlm.config.schema import Config, get
from megatron_vlm.config.searched_keys import SEARCHED, searched_keys
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.memory_switches import MEMORY_SWITCHES, shown, with_keys
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.search import Cluster, RunPlan, evaluate, refine_split, search

_MAX_GPUS = 512
_POLISHED = 3  # the fastest layouts, whose layers are split again with more care


def rank_layouts(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> list[RunPlan]:
    """Return the layouts that fit, the fastest first. Raise ConfigError if none does."""
    results = search(cfg, sizes, mix, cluster)
    if results.leanest is not None:
        problem, remedy = advice(cfg, sizes, mix, cluster, results.leanest)
        raise ConfigError(problem, key="model.path", found=cfg.model.path, remedy=remedy)
    if not results.fitting:
        given = [key for key in SEARCHED if key not in searched_keys(cfg)]
        raise ConfigError(
            f"allows no layout of {cluster.gpus} devices: TP x PP has to divide that number, and "
            "each replica needs a row of a step"
            + (f" (fixed: {', '.join(f'{key}={get(cfg, key)}' for key in given)})" * bool(given)),
            key="train.global_batch_size",
            found=cfg.train.global_batch_size,
            remedy="raise it, take another number of devices, or leave fixed keys out",
        )
    best = [refine_split(each, mix, cluster) for each in results.fitting[:_POLISHED]]
    return sorted([*best, *results.fitting[_POLISHED:]], key=lambda each: -each.tokens_per_s)


def advice(
    cfg: Config,
    sizes: ModelSizes,
    mix: RowSample,
    cluster: Cluster,
    leanest: RunPlan,
    is_fit: bool = False,
) -> tuple[str, str]:
    """Return the problem, what the leanest layout needs, and the remedy, the changes that would
    fit. `is_fit`: switches have been tried together."""
    parts = max(leanest.memory, key=lambda stage: stage.total)
    usable = USABLE * cluster.memory
    devices = f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)} of {_gib(cluster.memory)}"
    remedies = list(_remedies(cfg, sizes, mix, cluster))
    problem = (
        f"does not fit on {devices}: the leanest layout, "
        f"{leanest.degrees} with model.recompute={leanest.cfg.model.recompute}, needs "
        f"{_gib(leanest.need)} on its fullest rank, and {_gib(usable)} can be used (weights "
        f"{_gib(parts.weights)}, gradients {_gib(parts.gradients)}, optimizer "
        f"{_gib(parts.optimizer)}, activations {_gib(parts.activations + parts.working)})"
    )
    remedy = "what fits: " + "; ".join(remedies) if remedies else "no single change makes it fit"
    if not is_fit:
        remedy += "; megatron-vlm plan --fit tries switches together"
    return problem, remedy


def _remedies(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> Iterator[str]:
    """Yield the changes that fit: more GPUs, each switch, shorter rows, larger GPUs."""
    count = cluster.gpus
    while (count := 2 * count) <= _MAX_GPUS:
        # Each replica needs a row in each step.
        rows = max(cfg.train.global_batch_size, count)
        scaled = replace(cfg, train=replace(cfg.train, global_batch_size=rows))
        if need := _need(scaled, sizes, mix, replace(cluster, gpus=count)):
            yield f"{count} such GPUs ({need})"
            break
    yield from _switches(cfg, sizes, mix, cluster)
    longest = max(row.tokens for row in mix.rows)
    for tokens in (longest // 2, longest // 4):
        rows_ = tuple(row for row in mix.rows if row.tokens <= tokens)
        if rows_ and (need := _need(cfg, sizes, RowSample(rows_, mix.origin), cluster)):
            yield f"data.max_tokens={tokens} with data.truncation=drop ({need})"
            break
    for size in (24, 40, 48, 80, 96, 141, 192, 288):
        larger = replace(cluster, memory=size * 2**30)
        if larger.memory > cluster.memory and (need := _need(cfg, sizes, mix, larger)):
            yield f"{cluster.gpus} of {size} GiB ({need})"
            break


def _switches(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> Iterator[str]:
    """Yield each switch at its first value that fits, except those chosen with the layout."""
    for switch in MEMORY_SWITCHES:
        if switch.cost == "recomputation":
            continue
        for value in switch.further(cfg):
            changes = switch.at(value)
            if need := _need(with_keys(cfg, changes), sizes, mix, cluster):
                yield f"{switch.words.format(shown(changes))} ({need})"
                break


def _need(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> str | None:
    """Return what the fastest layout of this configuration needs, or None if none fits."""
    fitting = search(cfg, sizes, mix, cluster).fitting
    if not fitting:
        return None
    return f"{fitting[0].degrees}, {_gib(fitting[0].need)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


# Values to try; the first saves nothing. A fraction is tried at half, too.
_TRIED: Mapping[str, tuple[object, ...]] = {
    each.key: (0.0, 0.5, 1.0) if each.values == (0.0, 1.0) else each.values
    for each in MEMORY_SWITCHES
    if each.cost in ("moments", "host")
}
_RECOMPUTATION = {s.key: s.values[0] for s in MEMORY_SWITCHES if s.cost == "recomputation"}
_ROUNDING = frozenset(each.key for each in MEMORY_SWITCHES if each.cost == "moments")
_SAME = 0.02  # relative difference of two predictions that means nothing
_ROUNDING_COST = 0.1  # share of the time that rounded moments have to save, to be worth it


@dataclass(frozen=True)
class FittingSet:
    """Values of the switches with which the model fits, and the fastest layout."""

    switches: Mapping[str, object]  # those that are not at their default
    best: RunPlan

    @property
    def keys(self) -> list[str]:
        """Keys for a run."""
        return [shown({key: value}) for key, value in self.switches.items()]


@dataclass(frozen=True)
class SwitchCost:
    """Effect of one switch of a set, all else equal."""

    key: str
    saved: int  # bytes of the fullest rank on its device
    host: int  # bytes of host memory of the same rank
    slowdown: float  # relative increase of the step's time


def fitting_sets(
    cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster
) -> list[FittingSet]:
    """Return the sets of switches that fit, the fastest first and the smaller ones among equals.
    Rounded moments have to save a tenth of the time. Raise ConfigError if none fits."""
    results, leanest = [], None
    for switches in _combinations(cfg):
        trial = with_keys(cfg, switches)
        found = search(trial, sizes, mix, cluster)
        if found.fitting:
            results.append(FittingSet(switches, found.fitting[0]))
        elif found.leanest and (leanest is None or found.leanest.need < leanest.need):
            leanest = found.leanest
    if not results:
        assert leanest is not None
        problem, remedy = advice(cfg, sizes, mix, cluster, leanest, is_fit=True)
        raise ConfigError(problem, key="model.path", found=cfg.model.path, remedy=remedy)
    fastest = min(each.best.step_s for each in results)

    def order(each: FittingSet) -> tuple[int, int, int, float]:
        rounds = len(_ROUNDING & each.switches.keys())
        slower = round((each.best.step_s / fastest * (1 + _ROUNDING_COST * rounds) - 1) / _SAME)
        return slower, rounds, len(each.switches), each.best.step_s

    results.sort(key=order)
    return [each for place, each in enumerate(results) if not _adds_to(each, results[:place])]


def _adds_to(result: FittingSet, better: Sequence[FittingSet]) -> bool:
    """Return whether a better set has some of these switches, or the same at smaller values."""
    return any(
        all(
            key in result.switches and values.index(value) <= values.index(result.switches[key])
            for key, value in each.switches.items()
            for values in [_TRIED[key]]
        )
        for each in better
    )


def _combinations(cfg: Config) -> Iterator[dict[str, object]]:
    """Yield the switches that are on, for each combination. A key that the user has set stays."""
    free = {
        switch.key: _TRIED[switch.key]
        for switch in MEMORY_SWITCHES
        if switch.key in _TRIED and get(cfg, switch.key) == switch.values[0] and switch.further(cfg)
        if not (cfg.lora.rank and switch.key.startswith("optim."))
    }
    for chosen in product(*free.values()):
        values = zip(free, chosen, strict=True)
        yield {key: value for key, value in values if value != free[key][0]}


def switch_costs(
    fitting: FittingSet, sizes: ModelSizes, mix: RowSample, cluster: Cluster
) -> list[SwitchCost]:
    """Return what each switch of a set saves and costs in its layout, recomputation included."""
    best, costs = fitting.best, []
    on: dict[str, object] = {key: _TRIED[key][0] for key in fitting.switches}
    on |= {key: off for key, off in _RECOMPUTATION.items() if get(best.cfg, key) != off}
    for key, off in on.items():
        without = evaluate(with_keys(best.cfg, {key: off}), sizes, best.dims, mix, cluster)
        host = max(each.host for each in best.memory) - max(each.host for each in without.memory)
        saved, slowdown = without.need - best.need, best.step_s / without.step_s - 1
        costs.append(SwitchCost(shown({key: get(best.cfg, key)}), saved, host, slowdown))
    return costs
