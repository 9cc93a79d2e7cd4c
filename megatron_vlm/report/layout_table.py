"""The start-up report: the parameters of each stage by their part, and those that are trained."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import Part
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.io.printable import short_name
from megatron_vlm.report.terminal import plain_table

ADAPTERS = "lora"


@dataclass(frozen=True)
class StageReport:
    """Parameters of one stage by their part, with those of adapters apart. They are summed over the
    TP ranks of the stage; replicated ones are counted once."""

    stage: int
    layers: tuple[range, ...]  # one for each chunk
    total: Counter[str] = field(default_factory=Counter)
    trainable: Counter[str] = field(default_factory=Counter)


def stage_reports(cfg: Config, dims: ParallelDims, table: Sequence[Entry]) -> list[StageReport]:
    """Return one report per stage. TP's vocabulary padding is not counted."""
    chunks = range(dims.virtual_stages)
    reports = [
        StageReport(stage, tuple(dims.layers_of(stage, chunk) for chunk in chunks))
        for stage in range(dims.pp)
    ]
    for entry in table:
        report = reports[entry.stage]
        kind = ADAPTERS if entry.origin is Origin.added else entry.part
        report.total[kind] += entry.num_values
        if not entry.is_frozen(cfg):
            report.trainable[kind] += entry.num_values
    return reports


def layout_table(cfg: Config, where: str, reports: Sequence[StageReport]) -> Table:
    """Return the reports as a table. `where`: the platform and the type of weights."""
    model = cfg.model
    offloaded = f", offload_activations={model.offload_activations:g}"
    table = plain_table(
        title=f"{where}; backend={model.backend}, recompute={model.recompute}"
        + offloaded * bool(model.offload_activations),
        title_justify="left",
        caption="The vision tower sits on stage 0. A part in brackets is frozen.",
        caption_justify="left",
    )
    # In a terminal of 80 columns the adapters take the place of the total.
    adapted = any(report.total[ADAPTERS] for report in reports)
    kinds = [*Part, ADAPTERS] if adapted else [*Part]
    sums = ("trainable",) if adapted else ("total", "trainable")
    for column in ("stage", "layers", *kinds, *sums):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        span = ", ".join(f"{part[0]}-{part[-1]}" if part else "none" for part in report.layers)
        cells = [_cell(report.total[key], report.trainable[key]) for key in kinds]
        totals = [short_name(counted.total()) for counted in (report.total, report.trainable)]
        table.add_row(str(report.stage), span, *cells, *totals[-len(sums) :])
    return table


def _cell(total: int, trainable: int) -> Text:
    if not total:
        return Text("-")
    return Text(short_name(total)) if trainable else Text(f"({short_name(total)})", style="dim")


def size_text(size: float) -> str:
    """Format bytes in a readable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"
