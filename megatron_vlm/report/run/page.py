"""The page of one run: its figures, samples, curves, scores, examples, history, configuration."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_vlm.io.numbers_as_text import number, time_spent
from megatron_vlm.report.html import Html, contents, table, tag, tiles
from megatron_vlm.report.metrics_lines import EventLine, StartLine
from megatron_vlm.report.run.curves import CURVE_NAMES, curve_section, score_section, score_text
from megatron_vlm.report.run.examples import example_section
from megatron_vlm.report.run.expert_load_map import expert_section
from megatron_vlm.report.run.metrics_arrays import LoggedRun, RunMetrics, best_of
from megatron_vlm.report.run.rl_curves import sample_curves, sample_tiles
from megatron_vlm.report.run.rl_samples import sample_cards

_MAX_EVENTS = 200
_MAX_SKIPPED = 20
_MAX_SCORES = 6  # among the tiles


def run_page(run: LoggedRun, folder: Path) -> Iterator[Html]:
    """Yield the body of the page."""
    examples = [*example_section(folder / "examples.json")]
    yield from _header(run, bool(examples))
    yield from sample_curves([run])
    yield from sample_cards(run.metrics, folder)
    yield from curve_section([run])
    yield from expert_section(run.metrics)
    yield from score_section([run])
    yield from examples
    yield from _history(run.metrics)
    yield from _configuration(run)


def _header(run: LoggedRun, examples: bool) -> Iterator[Html]:
    metrics, start = run.metrics, run.metrics.last_start
    yield tag("h1", run.name)
    if start is not None:
        facts = [start.model, "a stream" if start.samples is None else f"{start.samples:,} samples"]
        trained = f"{start.trainable / 1e6:,.4g}M of them trained"
        facts.append(f"{start.parameters / 1e6:,.4g}M parameters, {trained}")
        facts.append(f"started {_time(metrics.starts[0])}")
        yield tag("p", " \u00b7 ".join(facts), class_="quiet")
    links = [("samples", "Samples")] if metrics.samples else []
    links += [("curves", "Curves")]
    links += [("experts", "Experts")] if metrics.loads else []
    links += [("evaluation", "Evaluation")] if metrics.evaluations else []
    links += [("examples", "Examples")] if examples else []
    yield contents([*links, ("history", "History"), ("configuration", "Configuration")])
    # The loss of samples does not measure progress: it is about 0 from the first step on.
    learnt = sample_tiles(metrics) if metrics.samples else _loss_tiles(metrics)
    yield tiles([*learnt, *_score_tiles(metrics), *_run_tiles(metrics)])


def _loss_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    losses = metrics.losses()
    for name, (loss, step) in losses.items():
        yield number(loss), f"{name} loss, step {step:,}"
    if not losses:
        yield "-", "loss"


def _score_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """Yield the best loss of each set, and the best value of the strictest score of its answers."""
    scores = []
    for name, evaluations in metrics.sets().items():
        answers = ("exact_match", "token_accuracy")
        strict = next((score for score in answers if best_of(evaluations, score)), "loss")
        for score in dict.fromkeys(("loss", strict)):
            if (best := best_of(evaluations, score)) is not None:
                what = f"best {name} {CURVE_NAMES[score]}, step {best.step:,}"
                scores.append((score_text(score, best.score(score)), what))
    yield from scores[:_MAX_SCORES]


def _run_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    start = metrics.last_start
    epoch = f", epoch {metrics.epochs_N[-1]}" if len(metrics.epochs_N) else ""
    steps = "steps" if start is None else f"of {start.total_steps:,} steps"
    yield f"{metrics.steps_done:,}", steps + epoch
    yield number(metrics.tokens_per_s), "tokens per second, median"
    again = f", {metrics.replaced:,} of them lost or done again" if metrics.replaced else ""
    yield time_spent(metrics.seconds), f"in steps{again}"
    if start is not None:
        lost = {"dropped": start.dropped or 0, "wrong": start.wrong or 0}
        if any(lost.values()):
            which = " and ".join(f"{count:,} {why}" for why, count in lost.items() if count)
            yield f"{sum(lost.values()):,}", f"records left out: {which}"
        yield layout_text(start), _processes(start)


def _history(metrics: RunMetrics) -> Iterator[Html]:
    yield tag("h2", "History", id="history")
    yield from _not_applied(metrics, "loss or gradient was not finite", metrics.skipped_N)
    yield from _not_applied(metrics, "no token of their batch was trained", metrics.empty_N)
    rows = [(_event(line), f"{line.step:,}") for line in metrics.history]
    notes = [f"The last {_MAX_EVENTS:,} of {len(rows):,}."] * (len(rows) > _MAX_EVENTS)
    if metrics.unreadable:
        lines = f"{metrics.unreadable:,} line{'s' if metrics.unreadable > 1 else ''}"
        notes.append(
            f"{lines} of metrics.jsonl cannot be read: a run that is killed cuts off its last one."
        )
    if not rows:
        rows = [("nothing was logged", "-")]
    yield table(("event", "step"), rows[-_MAX_EVENTS:], " ".join(notes))


def _not_applied(metrics: RunMetrics, why: str, which_N: np.ndarray) -> Iterator[Html]:
    steps = metrics.steps_N[which_N]
    if len(steps):
        text = f"Steps not applied because {why}: {len(steps):,}. Step "
        text += ", ".join(f"{step:,}" for step in steps[:_MAX_SKIPPED].tolist())
        yield tag("p", text + " ..." * (len(steps) > _MAX_SKIPPED), class_="alarm note")


def _configuration(run: LoggedRun) -> Iterator[Html]:
    yield tag("h2", "Configuration", id="configuration")
    if run.metrics.last_start is not None:
        versions = run.metrics.last_start.versions
        yield table(("package", "version"), [(str(k), str(v)) for k, v in versions.items()])
    if run.config:
        yield tag("details", tag("summary", "config.yaml"), tag("pre", run.config), class_="card")


def _event(line: StartLine | EventLine) -> str:
    if isinstance(line, EventLine):
        return line.text
    return f"started {_time(line)}: {layout_text(line)}, {_processes(line)}"


def layout_text(start: StartLine) -> str:
    """Format a layout, such as tp1 pp2 dp1."""
    return " ".join(f"{key}{degree}" for key, degree in start.layout.items()) or "-"


def _processes(start: StartLine) -> str:
    return f"{start.world:,} processes on {start.platform}"


def _time(start: StartLine) -> str:
    return start.time.replace("T", " ")
