"""The start-up report: which stage holds what, and what of it learns."""

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_vlm.model.build import part_of
from megatron_vlm.worker import MegatronWorker

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


def stage_reports(worker: MegatronWorker) -> list[StageReport]:
    """One report a stage, on every rank. A collective. TP's vocabulary padding is not counted."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    mine = StageReport(stage, worker.dims.layers_of(stage))
    params = dict(worker.model.named_parameters())
    for entry in worker.table:
        if entry.stage != stage:
            continue
        count = sum(worker.source.num_values(name) for name in entry.theirs)
        mine.total[submodule_of(entry.ours)] += count
        if params[entry.ours].requires_grad:
            mine.trainable[submodule_of(entry.ours)] += count
    group = parallel_state.get_pipeline_model_parallel_group()
    found: list[StageReport | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return [report for report in found if report is not None]


def print_report(worker: MegatronWorker) -> None:
    """Print the report on rank 0. A collective."""
    reports = stage_reports(worker)
    if dist.get_rank() != 0:
        return
    dims, cfg = worker.dims, worker.cfg
    table = Table(
        title=f"{worker.platform.name}, {worker.model.config.params_dtype}: "
        f"tp={dims.tp} pp={dims.pp} dp={dims.dp}; backend={cfg.model.backend}, "
        f"recompute={cfg.model.recompute}",
        title_justify="left",
        caption="The vision tower sits on stage 0. A part in brackets is frozen.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("stage", "layers", *_SUBMODULES, "total", "trainable"):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        layers = report.layers
        span = f"{layers[0]}-{layers[-1]}" if len(layers) else "none"
        cells = [_cell(report.total[key], report.trainable[key]) for key in _SUBMODULES]
        totals = (_short(report.total.total()), _short(report.trainable.total()))
        table.add_row(str(report.stage), span, *cells, *totals)
    Console().print(table)


def _cell(total: int, trainable: int) -> str:
    if not total:
        return "-"
    return _short(total) if trainable else f"[dim]({_short(total)})[/dim]"


def _short(count: int) -> str:
    """1,720,574,976 as 1.72B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
