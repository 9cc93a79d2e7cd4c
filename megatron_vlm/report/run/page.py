"""The page of one run: figures, samples, curves, scores, examples, history, use of memory. Then the
page of several runs: the best ones, differences of configuration, and curves together."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from megatron_vlm.errors import show_value
from megatron_vlm.io.printable import number, short_name, show_count, time_spent
from megatron_vlm.report.bench_table import bench_section
from megatron_vlm.report.metrics_lines import EventLine, StartLine, UsageLine
from megatron_vlm.report.run import chart_plans
from megatron_vlm.report.run.examples import answer_section, example_section
from megatron_vlm.report.run.metrics_arrays import CUT_OFF, SCORES, LoggedRun, RunMetrics, best_of
from megatron_vlm.report.run.rl_samples import SampleIndex, sample_cards
from megatron_vlm.report.sections import Code, Fold, Heading, Note, Report, Section, Table, Tiles

_MAX_EVENTS = 200
_MAX_SKIPPED = 20
_MAX_SCORES = 6  # among the tiles
_MAX_PHASES = 20
_MAX_RANKS = 16  # ranks in the table; of more, those with the most memory
_SAMPLE_TILES = {
    "kl": "KL to the initial model",
    "teacher_kl": "KL to the teacher",
    "seen": "KL to the model without the pictures",
    "apart": "largest difference of log-probs, sampler and trainer",
}


def run_report(run: LoggedRun, folder: Path, samples: SampleIndex | None = None) -> Report:
    """Return the report of a run with this folder. `samples`: their index, if the caller has it."""
    metrics, start = run.metrics, run.metrics.last_start
    lead = [] if start is None else [_facts(start, metrics.starts[0])]
    # The loss of samples does not measure progress: it is about 0 from the first step on.
    learnt = _sample_tiles(metrics) if metrics.samples else _loss_tiles(metrics)
    tiles = Tiles([*learnt, *_score_tiles(metrics), *_run_tiles(metrics)])
    sections = [
        *chart_plans.sample_section([run]),
        *sample_cards(metrics, folder, samples),
        *chart_plans.curve_section([run]),
        *chart_plans.score_section([run]),
        *bench_section(folder),
        *_usage(metrics),
        *example_section(folder / "examples.json"),
        *_history(metrics),
        *_configuration(run),
    ]
    return Report(f"{run.name}: training report", run.name, lead, [tiles], sections)


def _facts(start: StartLine, first: StartLine) -> str:
    samples = "a stream" if start.samples is None else show_count(start.samples, "sample")
    parameters = f"{short_name(start.parameters)} parameters"
    trained = f"{short_name(start.trainable)} of them trained"
    if start.trainable == start.parameters:
        trained = "all trained"
    facts = (start.model, samples, f"{parameters}, {trained}", f"started {_time(first)}")
    return " \u00b7 ".join(facts)


def _sample_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """Yield the results of learning from samples."""
    for name, (reward, first, last) in metrics.rewards().items():
        steps = f"steps {first:,} to {last:,}" if last > first else f"step {last:,}"
        yield number(reward), f"{name} mean reward, {steps}"
    for key, what in _SAMPLE_TILES.items():
        logged = ((getattr(line, key), line.step) for line in metrics.samples)
        if known := [(v, step) for v, step in logged if v is not None and math.isfinite(v)]:
            value, step = max(known, key=lambda each: each[0]) if key == "apart" else known[-1]
            yield number(value), f"{what}, step {step:,}"


def _loss_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    losses = metrics.losses()
    for name, (loss, step) in losses.items():
        mean = f", mean of {metrics.mean_of:,} steps up to" if metrics.mean_of > 1 else ","
        yield number(loss), f"{name} loss{mean if name == 'best' else ','} step {step:,}"
    if not losses:
        yield "-", "loss"


def _score_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """Yield the best reward, the best loss and the strictest score of answers of each set."""
    scores = []
    for name, evaluations in metrics.sets().items():
        answers = ("exact_match", "token_accuracy")
        strict = next((score for score in answers if best_of(evaluations, score)), "loss")
        for score in dict.fromkeys(("reward", "loss", strict)):
            if (best := best_of(evaluations, score)) is not None:
                what = f"best {name} {chart_plans.CURVE_NAMES[score]}, step {best.step:,}"
                scores.append((chart_plans.score_text(score, best.score(score)), what))
    yield from scores[:_MAX_SCORES]


def _run_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    start = metrics.last_start
    steps = "steps" if start is None else f"of {start.total_steps:,} steps"
    yield f"{metrics.steps_done:,}", steps
    yield from _data_tiles(metrics)
    yield number(metrics.tokens_per_s), "tokens per second, median"
    again = f", {metrics.replaced:,} of them lost or done again" if metrics.replaced else ""
    figure, in_steps = time_spent(metrics.seconds), f"in steps{again}"
    if metrics.wall_s:
        figure, in_steps = time_spent(metrics.wall_s), f"wall time, {figure} {in_steps}"
    yield figure, in_steps
    if start is not None:
        lost = {"dropped": start.dropped or 0, "wrong": start.wrong or 0}
        if any(lost.values()):
            which = " and ".join(f"{count:,} {why}" for why, count in lost.items() if count)
            yield f"{sum(lost.values()):,}", f"records left out: {which}"
        yield layout_text(start), _processes(start)


def _data_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """Yield the samples that were trained on or the prompts drawn; in old logs the epoch."""
    start, seen = metrics.last_start, metrics.samples_seen
    if metrics.samples:
        seen = sum(line.asked for line in metrics.samples)
    if seen is not None:
        size = start.samples if start is not None else None
        epochs = f", {seen / size:,.1f} epochs" if size else ""
        yield f"{seen:,}", f"{'prompts' if metrics.samples else 'samples'}{epochs}"
    elif len(metrics.epochs_N):
        yield f"{metrics.epochs_N[-1]}", "epoch, from 0"


def _history(metrics: RunMetrics) -> Iterator[Section]:
    yield Heading("History", "History")
    yield from _not_applied(metrics, "loss or gradient was not finite", metrics.skipped_N)
    yield from _not_applied(metrics, "no token of their batch was trained", metrics.empty_N)
    rows = [(_event(line), f"{line.step:,}") for line in metrics.history]
    notes = [f"The last {_MAX_EVENTS:,} of {len(rows):,}."] * (len(rows) > _MAX_EVENTS)
    if metrics.unreadable:
        lines = show_count(metrics.unreadable, "line")
        notes.append(f"{lines} of metrics.jsonl {CUT_OFF}")
    rows = rows[-_MAX_EVENTS:] or [("nothing was logged", "-")]
    yield Table(("event", "step"), rows, " ".join(notes))


def _not_applied(metrics: RunMetrics, why: str, which_N: np.ndarray) -> Iterator[Section]:
    steps = metrics.steps_N[which_N]
    if len(steps):
        text = f"Steps not applied because {why}: {len(steps):,}. Step "
        text += ", ".join(f"{step:,}" for step in steps[:_MAX_SKIPPED].tolist())
        yield Note(text + " ..." * (len(steps) > _MAX_SKIPPED), "alarm")


def _configuration(run: LoggedRun) -> Iterator[Section]:
    yield Heading("Configuration", "Configuration")
    if run.metrics.last_start is not None:
        versions = run.metrics.last_start.versions
        yield Table(("package", "version"), [(str(k), str(v)) for k, v in versions.items()])
    if run.config:
        yield Fold("config.yaml", "", [Code(run.config)])


def _event(line: StartLine | EventLine) -> str:
    if isinstance(line, EventLine):
        return line.text
    return f"started {_time(line)}: {layout_text(line)}, {_processes(line)}"


def layout_text(start: StartLine) -> str:
    """Format a layout, such as tp1 pp2 dp1."""
    return " ".join(f"{key}{degree}" for key, degree in start.layout.items()) or "-"


def _processes(start: StartLine) -> str:
    return f"{show_count(start.world, 'process')} on {start.device or start.platform}"


def _time(start: StartLine) -> str:
    return start.time.replace("T", " ")


def _usage(metrics: RunMetrics) -> Iterator[Section]:
    """Yield the time of each phase and the memory of each rank, unless the log is older."""
    if not metrics.usages:
        return
    yield Heading("Time and memory", "Time")
    yield _phase_table(metrics.usages)
    yield _memory_table(metrics.usages[-1])


def _phase_table(usages: tuple[UsageLine, ...]) -> Table:
    seconds: defaultdict[str, float] = defaultdict(float)
    for usage in usages:
        for phase, value in usage.seconds.items():
            if 0 <= value < float("inf"):
                seconds[phase] += value
    total = sum(seconds.values()) or 1.0
    rows = [
        (phase, time_spent(value), number(value / total, percent=True))
        for phase, value in sorted(seconds.items(), key=lambda each: -each[1])[:_MAX_PHASES]
    ]
    caption = f"On the clock of rank 0, up to step {usages[-1].step:,}; with steps done again."
    return Table(("phase", "time", "share"), rows, caption)


def _memory_table(usage: UsageLine) -> Table:
    ranks = sorted(enumerate(usage.memory_gb), key=lambda rank: -rank[1])[:_MAX_RANKS]
    rows = [(f"rank {rank}", f"{number(memory)} GB") for rank, memory in sorted(ranks)]
    which = "The most since the start"
    if (count := len(usage.memory_gb)) > _MAX_RANKS:
        which = f"The {_MAX_RANKS} fullest of {show_count(count, 'rank')}"
    return Table(("rank", "memory"), rows, f"{which}, at step {usage.step:,}.")


_MAX_TILES = 8


def comparison_report(runs: Sequence[LoggedRun], folders: Sequence[Path]) -> Report:
    """Return the report of these runs, whose answers are in their folders."""
    title = f"{len(runs)} runs compared"
    names = " \u00b7 ".join(run.name for run in runs)
    tiles = Tiles([*_tiles(runs)][:_MAX_TILES])
    return Report(title, title, [names], [tiles], [*_sections(runs, folders)])


def _sections(runs: Sequence[LoggedRun], folders: Sequence[Path]) -> Iterator[Section]:
    yield Heading("Runs", "Runs")
    yield _run_table(runs)
    yield Heading("Differences of configuration", "Differences")
    rows = [*differences([run.config for run in runs])]
    if rows:
        yield Table(("key", *(run.name for run in runs)), rows)
    else:
        yield Note("None but the folder.", "quiet")
    yield from chart_plans.sample_section(runs)
    yield from chart_plans.curve_section(runs)
    yield from chart_plans.score_section(runs)
    names = (run.name for run in runs)
    yield from answer_section(dict(zip(names, folders, strict=True)))


def _run_table(runs: Sequence[LoggedRun]) -> Table:
    """Return a row for each figure and a column for each run."""
    rewarded, scores = any(run.metrics.samples for run in runs), _scores(runs)
    figures = (
        *("steps", "last loss", "best loss"),
        *(["last mean reward", "best mean reward"] * rewarded),
        *(f"best {s} {chart_plans.CURVE_NAMES[k]}" for s, k in scores),
        *("tokens per second", "time in steps", "layout", "started"),
    )
    caption = "Best values name their step. Best losses are those of the smoothed curves."
    if rewarded:
        caption += " Rewards are means of 10 steps, of which the last is named."
    columns = [_column(run, scores, rewarded) for run in runs]
    rows = [*zip(figures, *columns, strict=True)]
    return Table(("", *(run.name for run in runs)), rows, caption)


def differences(configs: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the keys, `run` excepted, whose values are not equal in all config.yaml, with these."""
    flat = [dict(_flatten_config(config)) for config in configs]
    for key in dict.fromkeys(key for values in flat for key in values):
        values = tuple(of_run.get(key, "-") for of_run in flat)
        if len(set(values)) > 1 and key != "run":
            yield key, *values


def _flatten_config(config: str) -> Iterator[tuple[str, str]]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(config))
    except Exception as error:  # the errors of YAML and OmegaConf have no common base class
        yield "config.yaml", f"cannot be read: {type(error).__name__}"
        return
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict) and value:
            stack += [(f"{key}.{k}".lstrip("."), v) for k, v in reversed(value.items())]
        elif key:
            yield key, show_value(value) if value is None or isinstance(value, bool) else str(value)


def _scores(runs: Sequence[LoggedRun]) -> list[tuple[str, str]]:
    """Return the pairs of set and score that at least one run has."""
    sets = dict.fromkeys(name for run in runs for name in run.metrics.sets())
    return [
        (name, score)
        for name in sets
        for score in chart_plans.CURVE_NAMES
        if any(best_of(run.metrics.sets().get(name, []), score) for run in runs)
    ]


def _tiles(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, str]]:
    """Yield the best value of each figure, with the name of its run."""
    rewards = [(*run.metrics.rewards()["best"], run) for run in runs if run.metrics.rewards()]
    if rewards:
        reward, first, last, run = max(rewards, key=lambda found: found[0])
        yield number(reward), f"best mean reward: {run.name}, steps {first:,} to {last:,}"
    trained = [run for run in runs if run.metrics.losses() and not run.metrics.samples]
    losses = [(*run.metrics.losses()["best"], run) for run in trained]
    if losses:
        loss, step, run = min(losses, key=lambda found: found[0])
        yield number(loss), f"best loss: {run.name}, step {step:,}"
    for name, score in _scores(runs):
        results = [(best_of(run.metrics.sets().get(name, []), score), run) for run in runs]
        value, best, run = SCORES[score](
            ((e.score(score), e, run) for e, run in results if e is not None), key=lambda f: f[0]
        )
        what = f"best {name} {chart_plans.CURVE_NAMES[score]}: {run.name}, step {best.step:,}"
        yield chart_plans.score_text(score, value), what
    fast = [run for run in runs if math.isfinite(run.metrics.tokens_per_s)]
    if fast:
        run = max(fast, key=lambda run: run.metrics.tokens_per_s)
        yield number(run.metrics.tokens_per_s), f"most tokens per second, median: {run.name}"


def _column(run: LoggedRun, scores: Sequence[tuple[str, str]], rewarded: bool) -> tuple[str, ...]:
    metrics, start = run.metrics, run.metrics.last_start
    # The loss of samples is about 0 from the first step on.
    losses, sets = {} if metrics.samples else metrics.losses(), metrics.sets()
    last = number(losses["last"][0]) if losses else "-"
    best = _value_at_step(number(losses["best"][0]), losses["best"][1]) if losses else "-"
    rewards = metrics.rewards()
    means = [_value_at_step(number(mean), step) for mean, _, step in rewards.values()] or ["-", "-"]
    cells = means * rewarded
    for name, score in scores:
        best_line = best_of(sets.get(name, []), score)
        if best_line is None:
            cells.append("-")
        else:
            value = chart_plans.score_text(score, best_line.score(score))
            cells.append(_value_at_step(value, best_line.step))
    total = f"/{start.total_steps:,}" if start is not None else ""
    return (
        f"{metrics.steps_done:,}{total}",
        last,
        best,
        *cells,
        number(metrics.tokens_per_s),
        time_spent(metrics.seconds),
        "-" if start is None else layout_text(start),
        "-" if start is None else metrics.starts[0].time[:16].replace("T", " "),
    )


def _value_at_step(value: str, step: int) -> str:
    return f"{value} at {step:,}"
