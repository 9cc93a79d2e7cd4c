"""The report of `megatron-vlm plan --fit`: sets of memory switches, and the cost of each switch."""

from collections.abc import Sequence

from megatron_vlm.commands.plan.plan_report import MEMORY, Plan, assumptions, memory_cells
from megatron_vlm.planner.fit import FittingSet, SwitchCost
from megatron_vlm.report import sections

_COLUMNS = {
    "optim.states": "states",
    "optim.offload": "optim. on host",
    "model.offload_activations": "act. on host",
}
_SETS = (
    "tokens/s",
    "s/step",
    *_COLUMNS.values(),
    "layout",
    "micro-batch",
    "recompute",
    "GiB",
)
_SHOWN = 6


def fit_report(
    plan: Plan, sets: Sequence[FittingSet], costs: Sequence[SwitchCost]
) -> sections.Report:
    """Return the report. `costs` are those of the first set."""
    best, cluster = sets[0], plan.cluster
    title = f"{cluster.gpus} x {cluster.machine.name}, {cluster.memory / 2**30:,.0f} GiB"
    tiles = [
        (f"{best.best.tokens_per_s:,.0f}", "predicted tokens/s"),
        (f"{best.best.need / 2**30:.1f} GiB", "on the fullest rank"),
        (str(len(best.switches)), "switches"),
    ]
    body: list[sections.Section] = [
        sections.Heading("Switches with which it fits"),
        sections.Table(_SETS, [_cells(each) for each in sets[:_SHOWN]], _caption(sets)),
        sections.Command("The fastest: ", " ".join([*best.keys, *best.best.overrides])),
    ]
    if costs:
        rows = [
            (cost.key, _gib(cost.saved), _gib(cost.host), f"{cost.slowdown:+.0%}") for cost in costs
        ]
        header = ("switch", "saves GiB", "host GiB", "time")
        caption = "Each compared with the same layout without it, on the fullest rank."
        body += [sections.Heading("What each one costs"), sections.Table(header, rows, caption)]
    body += [
        sections.Heading("Memory of the fastest"),
        sections.Table(MEMORY, memory_cells(best.best), "GiB of one rank of each stage."),
        sections.Heading("Assumed"),
        sections.Listing("What was not counted:", assumptions(plan)),
    ]
    return sections.Report("What fits", title, [plan.cfg.model.path], [sections.Tiles(tiles)], body)


def _caption(sets: Sequence[FittingSet]) -> str:
    more = f"The first {_SHOWN} of {len(sets)} sets." if len(sets) > _SHOWN else ""
    return f"{more} Moments in bf16 or int8 are rounded; no other switch changes a bit.".strip()


def _cells(each: FittingSet) -> tuple[str, ...]:
    best, dims, model = each.best, each.best.dims, each.best.cfg.model
    tokens = best.cfg.train.micro_batch_tokens
    degrees = (("TP", dims.tp), ("PP", dims.pp), ("EP", dims.ep), ("DP", dims.dp))
    layout = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    return (
        f"{best.tokens_per_s:,.0f}",
        f"{best.step_s:.2f}",
        *(str(each.switches.get(key, "-")) for key in _COLUMNS),
        layout or "1 GPU",
        f"{tokens:,}" if tokens else "by rows",
        model.recompute + ", vision" * model.recompute_vision,
        f"{best.need / 2**30:.1f}",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
