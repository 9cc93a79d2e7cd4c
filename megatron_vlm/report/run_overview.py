"""The start-up report of a run, which a dry run prints, too: the parameters of each stage, and the
overview of what it learns from, for how long, what it needs, and where its results go."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from megatron_vlm.config.evaluation_checks import DEFAULT_MINUTES, DEFAULT_STEPS, epochs_between
from megatron_vlm.config.lora_base_types import BASE_TITLES
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, exports, learns
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, StreamSet
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import Part
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.io.printable import short_name, show_count, size_text
from megatron_vlm.planner.search import RunPlan
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.training.lr_schedule import epochs_in, total_steps

ADAPTERS = "lora"
_WIDTH = 80
_LABEL = 12
_MAX_NAMES = 4
_MAX_STAGES = 4


@dataclass(frozen=True)
class StageReport:
    """Parameters of one stage by part, with the adapters apart. They are summed over the
    TP ranks of the stage; replicated ones are counted once."""

    stage: int
    layers: tuple[range, ...]  # one for each chunk
    total: Counter[str] = field(default_factory=Counter)
    trainable: Counter[str] = field(default_factory=Counter)


def stage_reports(cfg: Config, dims: ParallelDims, table: Sequence[Entry]) -> list[StageReport]:
    """Return one report per stage. Neither TP's vocabulary padding nor a last stage's copy of the
    embedding, its tied head, is counted."""
    chunks = range(dims.virtual_stages)
    reports = [
        StageReport(stage, tuple(dims.layers_of(stage, chunk) for chunk in chunks))
        for stage in range(dims.pp)
    ]
    for entry in (each for each in table if each.origin is not Origin.copy):
        report = reports[entry.stage]
        kind = ADAPTERS if entry.origin is Origin.added else entry.part
        report.total[kind] += entry.num_values
        if not entry.is_frozen(cfg):
            report.trainable[kind] += entry.num_values
    return reports


def layout_table(cfg: Config, where: str, reports: Sequence[StageReport]) -> Table:
    """Return the reports as a table. `where`: the platform and the type of weights."""
    model = cfg.model
    title = f"{where}; backend={model.backend}, recompute={model.recompute}"
    if model.offload_activations:
        title += f", offload_activations={model.offload_activations:g}"
    table = plain_table(
        title=title,
        title_justify="left",
        caption="The vision tower sits on stage 0. A part in brackets is frozen.",
        caption_justify="left",
    )
    # In a terminal of 80 columns the adapters take the place of the total.
    adapted = any(report.total[ADAPTERS] for report in reports)
    rare = (Part.score, Part.mtp)
    parts = [part for part in Part if part not in rare or reports[-1].total[part]]
    kinds = [*parts, ADAPTERS] if adapted else parts
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


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its configuration does not have."""

    plan: RunPlan
    length: str  # number of samples and steps, as a sentence
    data: DataSet | StreamSet  # data.train
    remarks: Remarks  # on it
    held_out: Sequence[tuple[str, int]]  # name and samples of each evaluation set
    stages: Sequence[StageReport]
    available: str  # memory of a device, in words
    prompts_only: bool = False  # the samples are prompts


def run_overview(facts: RunFacts) -> str:
    """Return the overview: a label and a text in each line, within 80 columns."""
    cfg = facts.plan.cfg
    rows = {
        "data": _data(cfg, facts.remarks),
        "epoch": epoch_tokens(facts.data, facts.prompts_only),
        "steps": _steps(facts),
        "learns": _learning_parts(cfg, facts.stages),
        "rate": _rates(cfg),
        "layout": _layout(cfg, facts.plan.dims),
        "memory": _memory(facts.plan, facts.available),
        "evaluation": _evaluation(cfg, facts.held_out),
        "writes": _destinations(cfg),
    }
    return aligned_lines(rows)


def aligned_lines(rows: dict[str, str]) -> str:
    """Return lines of a label and a text that continues below itself, without empty texts."""
    lines = []
    for label, text in rows.items():
        wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_on_hyphens=False)
        lines += [f"{word:{_LABEL}}{line}" for word, line in zip([label], wrapped, strict=False)]
        lines += [" " * _LABEL + line for line in wrapped[1:]]
    return "\n".join(lines)


def _data(cfg: Config, remarks: Remarks) -> str:
    names = [spec.path for spec in cfg.data.train]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    lost = {"dropped": remarks.dropped, "wrong and skipped": remarks.wrong}
    left_out = ", ".join(f"{count:,} {why}" for why, count in lost.items() if count)
    text = f"{', '.join(names[:_MAX_NAMES])}{more}"
    if cfg.data.is_stream:
        return f"{text}: a stream, of which nothing is known before it is read"
    cut = f"; {show_count(remarks.truncated, 'record')} cut" * (cfg.data.truncation == "image_safe")
    return f"{text}; records left out: {left_out or 'none'}{cut}"


def epoch_tokens(data: DataSet | StreamSet, prompts_only: bool = False) -> str:
    """Describe the tokens and images of an epoch by the index; empty for a stream."""
    if isinstance(data, StreamSet):
        return ""
    sums = dict.fromkeys(("tokens", "supervised", "images"), 0.0)
    for index, count in zip(data.indexes, data.order.counts, strict=True):
        for name in sums:
            sums[name] += float(getattr(index, name).sum()) * count / max(1, len(index))
    supervised = "in prompts" if prompts_only else f"{sums['supervised']:,.0f} of them trained"
    images = show_count(round(sums["images"]), "image")
    return f"{sums['tokens']:,.0f} tokens, {supervised}; {images}"


def _steps(facts: RunFacts) -> str:
    train, samples = facts.plan.cfg.train, facts.data.length
    if samples is None:
        return facts.length
    total = total_steps(train, samples, facts.prompts_only)
    epochs = epochs_in(total, samples, train.global_batch_size, facts.prompts_only)
    return f"{facts.length}, {epochs:.3g} epoch{'s' * (epochs != 1)}"


def _learning_parts(cfg: Config, stages: Sequence[StageReport]) -> str:
    total = sum(stage.total.total() for stage in stages)
    trained = sum(stage.trainable.total() for stage in stages)
    numbers = f"{short_name(trained)} of {short_name(total)} parameters"
    parts = [part for part in SWITCHES if learns(cfg, part)]
    if cfg.lora.rank:
        targets = ", ".join(cfg.lora.targets)
        whole = f"; in full: {', '.join(parts)}" if parts else ""
        base = f"; frozen linear layers in {BASE_TITLES[cfg.lora.base]}" if cfg.lora.base else ""
        return f"{numbers}: adapters of rank {cfg.lora.rank} in {targets}{whole}{base}"
    frozen = [part for part in SWITCHES if part not in parts]
    rest = f"; frozen: {', '.join(frozen)}" if frozen else ""
    return f"{numbers}: {', '.join(parts) or 'none'}{rest}"


def _rates(cfg: Config) -> str:
    optim = cfg.optim
    lowest = optim.lr * optim.min_lr_ratio
    schedule = {
        "constant": "constant",
        "wsd": f"constant, then down to {lowest:g} in the last {optim.decay_ratio:.0%} of steps",
    }.get(optim.schedule, f"{optim.schedule} down to {lowest:g}")
    others = {"vision": optim.vision_lr, "merger": optim.merger_lr, "Muon": optim.muon_lr}
    own = "".join(f", {part} {rate:g}" for part, rate in others.items() if rate is not None)
    return f"lr {optim.lr:g}{own}; {schedule}"


def _layout(cfg: Config, dims: ParallelDims) -> str:
    train, count = cfg.train, dims.world_size
    chunks = f" virtual_stages={dims.virtual_stages}" if dims.virtual_stages > 1 else ""
    experts = f" ep={dims.ep}" if dims.ep > 1 else ""
    rows = show_count(train.micro_batch_size, "row")
    limit = rows if train.micro_batch_tokens is None else f"{train.micro_batch_tokens:,} tokens"
    text = (
        f"tp={dims.tp} pp={dims.pp}{chunks} dp={dims.dp}{experts} in "
        f"{show_count(count, 'process')}; micro-batches of at most {limit}"
    )
    if (idle := dims.dp - train.global_batch_size) > 0:
        text += f"; {idle} of the {dims.dp} replicas get no row: raise train.global_batch_size"
    return text


def _memory(plan: RunPlan, available: str) -> str:
    """Describe the memory of a rank of each stage, or of the fullest and the emptiest of many."""
    totals = [stage.total for stage in plan.memory]
    if len(totals) == 1:
        text = f"a rank needs about {size_text(totals[0])}"
    elif len(totals) <= _MAX_STAGES:
        each = [f"{size_text(total)} on stage {stage}" for stage, total in enumerate(totals)]
        text = f"a rank needs about {', '.join(each)}"
    else:
        most, least = totals.index(max(totals)), totals.index(min(totals))
        text = (
            f"a rank needs about {size_text(totals[most])} on stage {most}, the fullest, and "
            f"{size_text(totals[least])} on stage {least}, the emptiest"
        )
    text = f"{text}, of {available}" if available else text
    host = max(stage.host for stage in plan.memory)
    return f"{text}; and up to {size_text(host)} of host memory" if host else text


def _evaluation(cfg: Config, held_out: Sequence[tuple[str, int]]) -> str:
    # `rl` also measures sets of which only the rewards count.
    sizes = {entry.name: "rewards" for entry in cfg.data.eval}
    sizes |= {name: show_count(samples, "sample") for name, samples in held_out}
    if not sizes:
        return "none: data.eval is not set"
    sets = ", ".join(f"{name} ({size})" for name, size in list(sizes.items())[:_MAX_NAMES])
    more = f" and {len(sizes) - _MAX_NAMES} more" if len(sizes) > _MAX_NAMES else ""
    return f"{sets}{more} {_when(cfg.eval.every)}"


def _destinations(cfg: Config) -> str:
    """Describe where the results of a run go."""
    kinds = {"model": "the model", "adapter": "the adapters", "merged": "the merged model"}
    exported = " and ".join(kinds[kind] for kind in exports(cfg)) or "nothing"
    parts = [
        f"checkpoints {_when(cfg.checkpoint.every)} (the newest {cfg.checkpoint.keep_last} stay)",
        f"export of {exported}",
        "report.html" * cfg.log.report,
        *cfg.log.trackers,
        f"upload to {cfg.checkpoint.push}" if cfg.checkpoint.push else "",
    ]
    run = Path(cfg.run)
    beside = " (among the data)" * any(Path(each.path).parent == run for each in cfg.data.train)
    return f"{run}{beside}: {', '.join(filter(None, parts))}"


def _when(every: int | str | None) -> str:
    if (epochs := epochs_between(every)) is not None:
        return f"every {float(epochs):.4g} epochs and at the end"
    if every is None:
        return f"every {DEFAULT_MINUTES} minutes or {DEFAULT_STEPS} steps and at the end"
    if not every:
        return "at the end"
    return "after every step" if every == 1 else f"every {int(every):,} steps and at the end"
