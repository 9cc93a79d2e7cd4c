"""The start-up report: which stage holds what, and what of it learns. Needs no weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from megatron_vlm.config.schema import Config
from megatron_vlm.display.tables import plain_table
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.hf.names import Entry
from megatron_vlm.hf.source import Source
from megatron_vlm.model.build import is_frozen, part_of

_SUBMODULES = ("vision", "merger", "embed", "decoder", "head")


@dataclass(frozen=True)
class StageReport:
    """Parameters of one stage, summed over its TP ranks; replicated ones counted once."""

    stage: int
    layers: range
    total: Counter[str] = field(default_factory=Counter)
    trainable: Counter[str] = field(default_factory=Counter)


def submodule_of(name: str) -> str:
    """Which line of the report a parameter of our model belongs to."""
    if (part := part_of(name)) != "language":
        return part
    return {"embedding": "embed", "output_layer": "head"}.get(name.split(".")[0], "decoder")


def stage_reports(
    cfg: Config, source: Source, dims: ParallelDims, table: Sequence[Entry]
) -> list[StageReport]:
    """One a stage. TP's vocabulary padding is not counted."""
    reports = [StageReport(stage, dims.layers_of(stage)) for stage in range(dims.pp)]
    for entry in table:
        count = sum(source.num_values(name) for name in entry.theirs)
        report, part = reports[entry.stage], submodule_of(entry.ours)
        report.total[part] += count
        if not is_frozen(entry.ours, cfg.model):
            report.trainable[part] += count
    return reports


def layout_table(
    cfg: Config, dims: ParallelDims, where: str, reports: Sequence[StageReport]
) -> Table:
    """The reports, for people. `where`: the platform and the type of weights."""
    table = plain_table(
        title=f"{where}: tp={dims.tp} pp={dims.pp} dp={dims.dp}; backend={cfg.model.backend}, "
        f"recompute={cfg.model.recompute}",
        title_justify="left",
        caption="The vision tower sits on stage 0. A part in brackets is frozen.",
        caption_justify="left",
    )
    for column in ("stage", "layers", *_SUBMODULES, "total", "trainable"):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        layers = report.layers
        span = f"{layers[0]}-{layers[-1]}" if len(layers) else "none"
        cells = [_cell(report.total[key], report.trainable[key]) for key in _SUBMODULES]
        totals = (short(report.total.total()), short(report.trainable.total()))
        table.add_row(str(report.stage), span, *cells, *totals)
    return table


def _cell(total: int, trainable: int) -> str:
    if not total:
        return "-"
    return short(total) if trainable else f"[dim]({short(total)})[/dim]"


def short(count: int) -> str:
    """1,720,574,976 as 1.72B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
