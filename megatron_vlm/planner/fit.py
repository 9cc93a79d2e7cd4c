"""Sets of memory switches with which a model fits, the fastest first: `megatron-vlm plan --fit`.

A search over layouts chooses recomputation and micro-batches by itself. Here it is repeated for
each combination of the switches that it leaves alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_vlm.config.schema import Config, get
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.advice import advice
from megatron_vlm.planner.memory_switches import MEMORY_SWITCHES, shown, with_keys
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.run_plan import RunPlan
from megatron_vlm.planner.search import Cluster, evaluate, search

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
