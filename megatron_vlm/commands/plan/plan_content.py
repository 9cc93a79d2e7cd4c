"""Content of a plan, for the terminal and the page."""

from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.search import Candidate, Cluster

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
MEMORY = ("stage", "layers", "weights", "gradients", "optimizer", "activations", "working", "GiB")


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
        f"{cfg.train.micro_batch_tokens:,}",
        recompute,
        f"{candidate.need / 2**30:.1f}",
        f"{candidate.bubble:.0%}",
    )


def memory_cells(candidate: Candidate) -> list[tuple[str, ...]]:
    """Return the memory of each stage of a layout, in GiB."""
    rows = []
    for stage, memory in enumerate(candidate.memory):
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
        sizes = [f"{size / 2**30:.1f}" for size in (*parts, memory.working, memory.total)]
        rows.append((str(stage), str(candidate.dims.layers_per_stage[stage]), *sizes))
    return rows


def degrees(candidate: Candidate) -> str:
    """Format a layout as the pictures of a pipeline name it."""
    dims = candidate.dims
    return f"tp={dims.tp} pp={dims.pp} {f'ep={dims.ep} ' * (dims.ep > 1)}dp={dims.dp}"


@dataclass(frozen=True)
class Plan:
    """Layouts and assumptions that are shown."""

    cfg: Config
    mix: RowSample
    cluster: Cluster
    candidates: tuple[Candidate, ...]  # the fastest first
    tried: int  # number of layouts that fit
    has_experts: bool = False

    @property
    def layouts(self) -> list[tuple[str, ...]]:
        """The names of the columns, then a line for each layout. Either TP or EP is always 1."""
        place = PLAN_COLUMNS.index("tp" if self.has_experts else "ep")
        lines = [PLAN_COLUMNS, *map(cells, self.candidates)]
        return [(*line[:place], *line[place + 1 :]) for line in lines]

    @property
    def pipeline(self) -> Candidate | None:
        """The fastest layout that has several stages."""
        return next((candidate for candidate in self.candidates if candidate.dims.pp > 1), None)


def assumptions(plan: Plan) -> list[str]:
    """Return the assumed numbers, which were not counted, in sentences."""
    machine, cluster = plan.cluster.machine, plan.cluster
    speeds = [speed / 1e12 for speed in (machine.matmul, machine.attention, machine.moved)]
    experts = "Experts: all have equally many tokens; replicas that share them wait for each other."
    return [
        f"Rows: {plan.mix.origin}.",
        *[experts] * plan.has_experts,
        f"{machine.name}: {speeds[0]:,.0f} TFLOP/s in matrix products, {speeds[1]:,.0f} in "
        f"attention, {speeds[2]:.1f} TB/s in the rest, "
        f"{machine.link / 1e9:,.0f} GB/s between the {machine.devices} GPUs of a machine, "
        f"{machine.network / 1e9:,.0f} GB/s between machines.",
        f"Memory: {USABLE:.0%} of {cluster.memory / 2**30:,.0f} GiB; a step has "
        f"train.global_batch_size={plan.cfg.train.global_batch_size} rows.",
    ]
