"""The page of several runs: the best ones, differences of configuration, and curves together."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_vlm.errors import show_value
from megatron_vlm.io.printable import number, time_spent
from megatron_vlm.report.run import curves
from megatron_vlm.report.run.examples import answer_section
from megatron_vlm.report.run.metrics_arrays import SCORES, LoggedRun, best_of
from megatron_vlm.report.run.page import layout_text
from megatron_vlm.report.sections import Heading, Note, Report, Section, Table, Tiles

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
    yield from curves.sample_section(runs)
    yield from curves.curve_section(runs)
    yield from curves.score_section(runs)
    names = (run.name for run in runs)
    yield from answer_section(dict(zip(names, folders, strict=True)))


def _run_table(runs: Sequence[LoggedRun]) -> Table:
    """Return a row for each figure and a column for each run."""
    rewarded, scores = any(run.metrics.samples for run in runs), _scores(runs)
    figures = (
        *("steps", "last loss", "best loss"),
        *(["last mean reward", "best mean reward"] * rewarded),
        *(f"best {s} {curves.CURVE_NAMES[k]}" for s, k in scores),
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
        for score in curves.CURVE_NAMES
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
        what = f"best {name} {curves.CURVE_NAMES[score]}: {run.name}, step {best.step:,}"
        yield curves.score_text(score, value), what
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
            value = curves.score_text(score, best_line.score(score))
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
