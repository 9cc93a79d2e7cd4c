"""The page of a run: its figures, curves, scores, examples, history and configuration."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_vlm.display.charts import CHART_CSS
from megatron_vlm.display.html import Html, contents, document, table, tag, tiles
from megatron_vlm.display.scales import number
from megatron_vlm.run.report.curves import NAMES, curve_section, score_section, score_text
from megatron_vlm.run.report.examples import EXAMPLE_CSS, Examples, example_section
from megatron_vlm.run.report.metrics import RunMetrics, best_of

_MOST_EVENTS = 200
_MOST_SKIPPED = 20
_MOST_SCORES = 6  # among the tiles


def render_report(name: str, metrics: RunMetrics, examples: Examples | None, config: str) -> str:
    """The whole page."""
    body = [*_header(name, metrics, examples), *curve_section(metrics), *score_section(metrics)]
    if examples is not None:
        body += example_section(examples)
    body += [*_history(metrics), *_configuration(metrics, config)]
    return document(f"{name}: training report", CHART_CSS + EXAMPLE_CSS + _CSS, body)


def _header(name: str, metrics: RunMetrics, examples: Examples | None) -> Iterator[Html]:
    start = metrics.last_start
    yield tag("h1", name)
    facts = [start.get("model"), _count(start, "samples", "samples"), _parameters(start)]
    facts += [f"started {_time(first)}" for first in metrics.starts[:1]]
    yield tag("p", " \u00b7 ".join(str(fact) for fact in facts if fact), class_="quiet")
    links = [("curves", "Curves")]
    links += [("evaluation", "Evaluation")] if metrics.evaluations else []
    links += [("examples", "Examples")] if examples is not None else []
    yield contents([*links, ("history", "History"), ("configuration", "Configuration")])
    yield tiles([*_loss_tiles(metrics), *_score_tiles(metrics), *_run_tiles(metrics)])


def _loss_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    loss_N = metrics.figures["loss"]
    finite = np.flatnonzero(np.isfinite(loss_N))
    if not len(finite):
        yield "-", "loss"
        return
    for name, row in (("last", finite[-1]), ("best", finite[np.argmin(loss_N[finite])])):
        yield number(float(loss_N[row])), f"{name} loss, step {metrics.steps_N[row]:,}"


def _score_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """The best loss of each set, and the best of the strictest score of its answers."""
    found = []
    for name, evaluations in metrics.sets().items():
        answers = ("exact_match", "token_accuracy")
        strict = next((score for score in answers if best_of(evaluations, score)), "loss")
        for score in dict.fromkeys(("loss", strict)):
            if (best := best_of(evaluations, score)) is not None:
                what = f"best {name} {NAMES[score]}, step {best.step:,}"
                found.append((score_text(score, best.scores[score]), what))
    yield from found[:_MOST_SCORES]


def _run_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    start = metrics.last_start
    epoch = f", epoch {metrics.epochs_N[-1]}" if len(metrics.epochs_N) else ""
    yield (
        f"{metrics.steps_done:,}",
        (_count(start, "total_steps", "steps", "of ") or "steps") + epoch,
    )
    rate_N = metrics.figures["tokens_per_s"]
    rate_N = rate_N[np.isfinite(rate_N)]
    yield number(float(np.median(rate_N)) if len(rate_N) else math.nan), "tokens a second, median"
    again = f", {metrics.replaced:,} of them lost or done again" if metrics.replaced else ""
    yield duration(metrics.seconds), f"in steps{again}"
    if start:
        yield _layout(start), _processes(start)


def _history(metrics: RunMetrics) -> Iterator[Html]:
    yield tag("h2", "History", id="history")
    skipped = metrics.steps_N[metrics.skipped_N]
    if len(skipped):
        text = f"Steps not applied, since loss or gradient was not finite: {len(skipped):,}. Step "
        text += ", ".join(f"{step:,}" for step in skipped[:_MOST_SKIPPED].tolist())
        yield tag("p", text + " ..." * (len(skipped) > _MOST_SKIPPED), class_="alarm note")
    rows = [(_event(line), f"{line['step']:,}") for line in metrics.history]
    notes = [f"The last {_MOST_EVENTS:,} of {len(rows):,}."] * (len(rows) > _MOST_EVENTS)
    if metrics.unreadable:
        lines = f"{metrics.unreadable:,} line{'s' if metrics.unreadable > 1 else ''}"
        notes.append(f"{lines} of metrics.jsonl cannot be read: a killed run cuts its last one.")
    if not rows:
        rows = [("nothing was logged", "-")]
    yield table(("event", "step"), rows[-_MOST_EVENTS:], " ".join(notes))


def _configuration(metrics: RunMetrics, config: str) -> Iterator[Html]:
    yield tag("h2", "Configuration", id="configuration")
    versions = metrics.last_start.get("versions")
    if isinstance(versions, dict):
        yield table(("package", "version"), [(str(k), str(v)) for k, v in versions.items()])
    if config:
        yield tag("details", tag("summary", "config.yaml"), tag("pre", config), class_="card")


def duration(seconds: float) -> str:
    """4,000 s as 1 h 6 min: the two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 24 * 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def _event(line: dict[str, Any]) -> str:
    if line["kind"] == "event":
        return line["text"]
    return f"started {_time(line)}: {_layout(line)}, {_processes(line)}"


def _layout(start: dict[str, Any]) -> str:
    layout = start.get("layout")
    items = layout.items() if isinstance(layout, dict) else ()
    return " ".join(f"{key}{degree}" for key, degree in items) or "-"


def _processes(start: dict[str, Any]) -> str:
    world = _count(start, "world", "processes") or "processes"
    return f"{world} on {start.get('platform', '?')}"


def _time(start: dict[str, Any]) -> str:
    return str(start.get("time", "?")).replace("T", " ")


def _parameters(start: dict[str, Any]) -> str:
    total, trained = start.get("parameters"), start.get("trainable")
    if not isinstance(total, int) or not isinstance(trained, int):
        return ""
    return f"{total / 1e6:,.4g}M parameters, {trained / 1e6:,.4g}M of them trained"


def _count(start: dict[str, Any], key: str, noun: str, before: str = "") -> str:
    """20,000 samples; nothing where the line does not say."""
    value = start.get(key)
    return f"{before}{value:,} {noun}" if isinstance(value, int) else ""


_CSS = """
.tiles { grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
.tiles span { display: block; font-size: .875rem; line-height: 1.4; color: var(--quiet); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); }
.charts .line { stroke-width: 1.5px; }
.note { margin-bottom: .9rem; }
summary { cursor: pointer; }
pre { font-size: .8rem; line-height: 1.45; overflow-x: auto; margin: .8rem 0 0; }
th:first-child, td:first-child { min-width: 5.6rem; }
"""
