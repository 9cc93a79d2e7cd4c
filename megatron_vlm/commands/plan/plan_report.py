"""A plan as a report: the fastest layouts, the pipeline, the memory of each stage, assumptions."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import CARDS
from megatron_vlm.io.printable import time_spent
from megatron_vlm.planner.advice import FittingSet, SwitchCost
from megatron_vlm.planner.hardware import MOVED_PER_BANDWIDTH, Machine
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.search import Cluster, RunPlan
from megatron_vlm.report import sections

_DEGREES = ("tp", "pp", "ep", "dp")
_LAYOUT = ("layers", "micro-batch", "recompute", "GiB", "bubble")
_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "nccl", "total", "host")
_SWITCHES = {
    "optim.states": "states",
    "optim.offload": "optim. on host",
    "model.offload_activations": "act. on host",
}
_SETS_SHOWN = 6


@dataclass(frozen=True)
class Plan:
    """Layouts and assumptions that are shown."""

    cfg: Config
    mix: RowSample
    cluster: Cluster
    candidates: tuple[RunPlan, ...]  # the fastest first
    tried: int  # number of layouts that fit
    has_experts: bool = False


def plan_report(plan: Plan) -> sections.Report:
    """Return the report of the fastest layouts."""
    best = plan.candidates[0]
    tiles = [
        (f"{best.tokens_per_s:,.0f}", "predicted tokens/s"),
        (time_spent(best.step_s), "a step"),
        (f"{_gib(best.need)} GiB", "on the fullest rank"),
        (f"{best.bubble:.0%}", "share of the time that stages wait"),
    ]
    body: list[sections.Section] = [
        sections.Heading("Layouts"),
        _layouts(plan),
        sections.Command("The fastest: ", " ".join(best.overrides)),
        sections.Heading("Pipeline of the fastest"),
        _pipeline(best),
    ]
    pipelined = next((each for each in plan.candidates if each.dims.pp > 1), None)
    if pipelined is not None and best.dims.pp == 1:
        title = "Pipeline of the fastest that has several stages"
        body += [sections.Heading(title), _pipeline(pipelined)]
    return _report("Plan of a layout", plan, tiles, body)


def _report(
    tab: str, plan: Plan, tiles: Sequence[tuple[str, str]], body: Sequence[sections.Section]
) -> sections.Report:
    """Return a report, which ends with the memory of the fastest layout and what was assumed."""
    cluster = plan.cluster
    title = f"{cluster.gpus} x {cluster.machine.name}, {cluster.memory / 2**30:,.0f} GiB"
    header = ("stage", "layers", *("GiB" if name == "total" else name for name in _PARTS))
    fastest = plan.candidates[0]
    stages = enumerate(zip(fastest.memory, fastest.dims.layers_per_stage, strict=True))
    cells = [
        (str(stage), str(layers), *(_gib(getattr(memory, name)) for name in _PARTS))
        for stage, (memory, layers) in stages
    ]
    last = [
        sections.Heading("Memory of the fastest"),
        sections.Table(header, cells, "GiB of one rank of each stage."),
        sections.Heading("Assumed"),
        sections.Listing("What was not counted:", _assumptions(plan)),
    ]
    rows = f"a step has train.global_batch_size={plan.cfg.train.global_batch_size} rows"
    lead, summary = [plan.cfg.model.path, rows], [sections.Tiles(tiles)]
    return sections.Report(tab, title, lead, summary, [*body, *last])


def _layouts(plan: Plan) -> sections.Table:
    """Return a line for each layout. Either TP or EP is always 1, and has no column."""
    degrees = [name for name in _DEGREES if name != ("tp" if plan.has_experts else "ep")]
    rows = [
        (*_speed(each), *(str(getattr(each.dims, name)) for name in degrees), *_layout_cells(each))
        for each in plan.candidates
    ]
    caption = f"The fastest of {plan.tried:,} that fit. GiB: of the fullest rank."
    return sections.Table(("tokens/s", "s/step", *degrees, *_LAYOUT), rows, caption)


def _speed(plan: RunPlan) -> tuple[str, str]:
    return f"{plan.tokens_per_s:,.0f}", f"{plan.step_s:.2f}"


def _batch_and_memory(plan: RunPlan) -> tuple[str, str, str]:
    """Return the cells of the micro-batch, of what is recomputed, and of the fullest rank."""
    tokens, model = plan.cfg.train.micro_batch_tokens, plan.cfg.model
    recomputed = model.recompute + ", vision" * model.recompute_vision
    return f"{tokens:,}" if tokens else "by rows", recomputed, _gib(plan.need)


def _layout_cells(plan: RunPlan) -> tuple[str, ...]:
    split = plan.dims.layers_per_stage
    layers = " ".join(map(str, split))
    if plan.dims.pp > 4:
        layers = f"{split[0]}, {min(split[1:-1])}-{max(split[1:-1])}, {split[-1]}"
    return layers, *_batch_and_memory(plan), f"{plan.bubble:.0%}"


def _pipeline(drawn: RunPlan) -> sections.Timeline:
    assert drawn.stages is not None
    dims = drawn.dims
    degrees = f"tp={dims.tp} pp={dims.pp} {f'ep={dims.ep} ' * (dims.ep > 1)}dp={dims.dp}"
    words = (
        f"{degrees}, layers {list(dims.layers_per_stage)}: one step of one replica. Stages wait "
        f"{drawn.bubble:.0%} of the time."
    )
    return pipeline_timeline(drawn.stages, words)


def pipeline_timeline(stages: Stages, words: str) -> sections.Timeline:
    """Return the forwards and backwards of the stages of one replica."""
    boxes = [sections.TimeBox(t.stage, t.forward, t.micro, t.start, t.end) for t in stages.tasks]
    return sections.Timeline(words, stages.forward_GS.shape[1], boxes)


def _moved(machine: Machine) -> str:
    """Return the speed of reading and writing, and how it follows from the card's memory."""
    if machine.card is None:
        return f"{machine.moved / 1e12:.2f} TB/s"
    bandwidth = CARDS[machine.card].bandwidth / 1e12
    return (
        f"{machine.moved / 1e12:.2f} TB/s (its memory's {bandwidth:.2f} x "
        f"{MOVED_PER_BANDWIDTH:.2f}, as estimated for an H200)"
    )


def _assumptions(plan: Plan) -> list[str]:
    """Return the assumed numbers, which were not counted, in sentences."""
    machine, cluster = plan.cluster.machine, plan.cluster
    speeds = [speed / 1e12 for speed in (machine.matmul, machine.attention)]
    experts = "Experts: all have equally many tokens; replicas that share them wait for each other."
    return [
        f"Rows: {plan.mix.origin}.",
        *[experts] * plan.has_experts,
        f"{machine.name}: {speeds[0]:,.0f} TFLOP/s in matrix products, {speeds[1]:,.0f} in "
        f"attention, {_moved(machine)} in the rest, "
        f"{machine.link / 1e9:,.0f} GB/s between the {machine.devices} GPUs of a machine, "
        f"{machine.network / 1e9:,.0f} GB/s between machines.",
        f"Host memory: {machine.host_link / 1e9:,.0f} GB/s to each GPU; AdamW moves "
        f"{machine.host_moved / 1e9:,.0f} GB/s there for each, on {machine.host_cores} cores.",
        f"Memory: {USABLE:.0%} of {cluster.memory / 2**30:,.0f} GiB.",
    ]


def fit_report(
    plan: Plan, sets: Sequence[FittingSet], costs: Sequence[SwitchCost]
) -> sections.Report:
    """Return the report of sets of switches. `costs` belong to the first set."""
    best = sets[0]
    tiles = [
        (f"{best.best.tokens_per_s:,.0f}", "predicted tokens/s"),
        (f"{_gib(best.best.need)} GiB", "on the fullest rank"),
        (str(len(best.switches)), "switches"),
    ]
    more = f"The first {_SETS_SHOWN} of {len(sets)} sets. " if len(sets) > _SETS_SHOWN else ""
    caption = f"{more}Moments in bf16 or int8 are rounded; no other switch changes a bit."
    header = ("tokens/s", "s/step", *_SWITCHES.values(), "layout", *_LAYOUT[1:-1])
    body: list[sections.Section] = [
        sections.Heading("Switches with which it fits"),
        sections.Table(header, [_set_cells(each) for each in sets[:_SETS_SHOWN]], caption),
        sections.Command("The fastest: ", " ".join([*best.keys, *best.best.overrides])),
    ]
    if costs:
        rows = [
            (cost.key, _gib(cost.saved), _gib(cost.host), f"{cost.slowdown:+.0%}") for cost in costs
        ]
        columns = ("switch", "saves GiB", "host GiB", "time")
        caption = "Each compared with the same layout without it, on the fullest rank."
        body += [sections.Heading("What each one costs"), sections.Table(columns, rows, caption)]
    return _report("What fits", plan, tiles, body)


def _set_cells(each: FittingSet) -> tuple[str, ...]:
    degrees = ((name.upper(), getattr(each.best.dims, name)) for name in _DEGREES)
    layout = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    switches = (str(each.switches.get(key, "-")) for key in _SWITCHES)
    return *_speed(each.best), *switches, layout or "1 GPU", *_batch_and_memory(each.best)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
