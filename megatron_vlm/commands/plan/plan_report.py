"""A plan as a report: the fastest layouts, the pipeline, the memory of each stage, assumptions."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.io.printable import time_spent
from megatron_vlm.planner.hardware import CARD_MEMORY, MOVED_PER_BANDWIDTH, Machine
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.search import Candidate, Cluster
from megatron_vlm.report import sections

PLAN_COLUMNS = (
    "tokens/s",
    "s/step",
    "tp",
    "pp",
    "ep",
    "dp",
    "layers",
    "micro-batch",
    "recompute",
    "GiB",
    "bubble",
)
MEMORY = (
    "stage",
    "layers",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "working",
    "GiB",
    "host",
)


@dataclass(frozen=True)
class Plan:
    """Layouts and assumptions that are shown."""

    cfg: Config
    mix: RowSample
    cluster: Cluster
    candidates: tuple[Candidate, ...]  # the fastest first
    tried: int  # number of layouts that fit
    has_experts: bool = False


def plan_report(plan: Plan) -> sections.Report:
    """Return the whole report."""
    best, cluster = plan.candidates[0], plan.cluster
    title = f"{cluster.gpus} x {cluster.machine.name}, {cluster.memory / 2**30:,.0f} GiB"
    tiles = [
        (f"{best.tokens_per_s:,.0f}", "predicted tokens/s"),
        (time_spent(best.step_s), "a step"),
        (f"{best.need / 2**30:.1f} GiB", "on the fullest rank"),
        (f"{best.bubble:.0%}", "share of the time that stages wait"),
    ]
    lead = [plan.cfg.model.path]
    return sections.Report(
        "Plan of a layout", title, lead, [sections.Tiles(tiles)], [*_sections(plan)]
    )


def _sections(plan: Plan) -> Iterator[sections.Section]:
    best = plan.candidates[0]
    yield sections.Heading("Layouts")
    yield _layouts(plan)
    yield sections.Command("The fastest: ", " ".join(best.overrides))
    yield sections.Heading("Pipeline of the fastest")
    yield _pipeline(best)
    pipelined = next((each for each in plan.candidates if each.dims.pp > 1), None)
    if pipelined is not None and best.dims.pp == 1:
        yield sections.Heading("Pipeline of the fastest that has several stages")
        yield _pipeline(pipelined)
    yield sections.Heading("Memory of the fastest")
    yield sections.Table(MEMORY, memory_cells(best), "GiB of one rank of each stage.")
    yield sections.Heading("Assumed")
    yield sections.Listing("What was not counted:", assumptions(plan))


def _layouts(plan: Plan) -> sections.Table:
    """Return a line for each layout. Either TP or EP is always 1, and has no column."""
    place = PLAN_COLUMNS.index("tp" if plan.has_experts else "ep")
    lines = [PLAN_COLUMNS, *map(cells, plan.candidates)]
    header, *rows = [(*line[:place], *line[place + 1 :]) for line in lines]
    caption = f"The fastest of {plan.tried:,} that fit. GiB: of the fullest rank."
    return sections.Table(header, rows, caption)


def cells(candidate: Candidate) -> tuple[str, ...]:
    """Return the cells of a layout."""
    dims, cfg = candidate.dims, candidate.cfg
    split = dims.layers_per_stage
    layers = " ".join(map(str, split))
    if dims.pp > 4:
        layers = f"{split[0]}, {min(split[1:-1])}-{max(split[1:-1])}, {split[-1]}"
    recompute = cfg.model.recompute + ", vision" * cfg.model.recompute_vision
    return (
        f"{candidate.tokens_per_s:,.0f}",
        f"{candidate.step_s:.2f}",
        str(dims.tp),
        str(dims.pp),
        str(dims.ep),
        str(dims.dp),
        layers,
        f"{cfg.train.micro_batch_tokens:,}" if cfg.train.micro_batch_tokens else "by rows",
        recompute,
        f"{candidate.need / 2**30:.1f}",
        f"{candidate.bubble:.0%}",
    )


def memory_cells(candidate: Candidate) -> list[tuple[str, ...]]:
    """Return the memory of each stage of a layout, in GiB."""
    rows = []
    for stage, memory in enumerate(candidate.memory):
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
        sizes = [
            f"{size / 2**30:.1f}" for size in (*parts, memory.working, memory.total, memory.host)
        ]
        rows.append((str(stage), str(candidate.dims.layers_per_stage[stage]), *sizes))
    return rows


def _pipeline(drawn: Candidate) -> sections.Timeline:
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
    bandwidth = CARD_MEMORY[machine.card][0] / 1e12
    return (
        f"{machine.moved / 1e12:.2f} TB/s (its memory's {bandwidth:.2f} x "
        f"{MOVED_PER_BANDWIDTH:.2f}, as estimated for an H200)"
    )


def assumptions(plan: Plan) -> list[str]:
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
        f"Memory: {USABLE:.0%} of {cluster.memory / 2**30:,.0f} GiB; a step has "
        f"train.global_batch_size={plan.cfg.train.global_batch_size} rows.",
    ]
