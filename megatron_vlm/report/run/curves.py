"""The charts of a page: the loss first, then figures that explain it, costs and scores.

On the page of one run, each set has a colour; on the page of several runs, each run has one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.io.numbers_as_text import number, smooth
from megatron_vlm.report.charts import Chart, Curve, StepMarks, chart_figure
from megatron_vlm.report.html import Html, table, tag
from megatron_vlm.report.metrics_lines import EvalLine
from megatron_vlm.report.run.metrics_arrays import LoggedRun, RunMetrics, best_of

_MAX_ROWS = 200  # rows of the table of evaluations
_SMOOTH_FROM = 80  # steps
CURVE_NAMES = {
    "loss": "loss",
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "ranking": "ranking",
}


@dataclass(frozen=True)
class StepChart:
    """Chart of figures that every step logs. `keys`: a field of StepLine for each curve."""

    title: str
    keys: dict[str, str]  # name of the curve: field
    unit: str = ""
    percent: bool = False
    may_log: bool = False
    steady: bool = False  # needs no smoothing
    optional: bool = False  # left out if no value is above 0


_STEP_CHARTS = (
    StepChart("Learning rate", {"learning rate": "lr"}, steady=True),
    StepChart("Gradient norm", {"norm": "grad_norm"}, may_log=True),
    StepChart("Tokens", {"all": "tokens_per_s", "trained": "trained_tokens_per_s"}, "per second"),
    StepChart("Images", {"images": "images_per_s"}, "per second", optional=True),
    StepChart("Step time", {"time": "seconds"}, "seconds", may_log=True),
    StepChart("Padding", {"padding": "padding"}, "of all positions", percent=True),
    StepChart("MFU", {"MFU": "mfu"}, "of peak FLOP/s", percent=True, optional=True),
    StepChart("Busiest expert", {"busiest": "expert_load"}, "times the mean", optional=True),
    StepChart("Balancing loss", {"balance": "balance_loss"}, optional=True),
    StepChart("Router z loss", {"z": "z_loss"}, may_log=True, optional=True),
    StepChart("Memory", {"memory": "memory_gb"}, "GB", steady=True),
)


def curve_section(runs: Sequence[LoggedRun]) -> Iterator[Html]:
    """Yield the curves of the figures that are logged with each step."""
    yield tag("h2", "Curves over steps", id="curves")
    if not any(len(run.metrics.steps_N) for run in runs):
        yield tag("p", "No step was logged.", class_="quiet")
        return
    if not any(run.metrics.samples for run in runs):  # sample_curves has yielded the notes above
        yield from chart_notes()
    span = steps_span(runs)
    losses = step_curves(runs, {"training": "loss"}, of_step) + _score_curves(runs, "loss")
    loss = Chart("Loss", losses, may_log=True, marks=tuple(_marks(runs, *span)), height=300)
    yield chart_figure(loss, *span)
    small = []
    for plan in _STEP_CHARTS:
        curves = step_curves(runs, plan.keys, of_step, plan.steady)
        if plan.optional and not any(np.nanmax(c.y, initial=0) > 0 for c in curves):
            continue
        small.append(Chart(plan.title, curves, plan.unit, plan.percent, plan.may_log))
    yield tag("div", *(chart_figure(chart, *span) for chart in small), class_="charts")


def chart_notes() -> Iterator[Html]:
    """Yield the notes that a page has once, above its first chart."""
    script = "The curves are drawn by JavaScript, which is off. Nothing else here needs it."
    yield tag("noscript", tag("p", script, class_="alarm"))
    help_ = "Drag over a chart to zoom in on steps, double-click to zoom out."
    yield tag("p", help_, class_="quiet note")


def score_section(runs: Sequence[LoggedRun]) -> Iterator[Html]:
    """Yield charts and a table of each set; nothing if there was no evaluation."""
    all_evaluations = [e for run in runs for e in run.metrics.evaluations]
    if not all_evaluations:
        return
    yield tag("h2", "Evaluation", id="evaluation")
    charts = []
    for score, name in CURVE_NAMES.items():
        if curves := _score_curves(runs, score):
            chart = Chart(name.capitalize(), curves, percent=score != "loss")
            charts.append(chart_figure(chart, *steps_span(runs)))
    yield tag("div", *charts, class_="charts")
    scores = [s for s in CURVE_NAMES if any(math.isfinite(e.score(s)) for e in all_evaluations)]
    max_rows = max(3, _MAX_ROWS // sum(len(run.metrics.sets()) for run in runs))
    rows = [
        (run.name, *row) if len(runs) > 1 else row
        for run in runs
        for evaluations in run.metrics.sets().values()
        for row in _rows(evaluations, scores, max_rows)
    ]
    caption = "* the best of its set."
    if len(rows) < len(all_evaluations):
        caption += f" Of each set, the best and the last {max_rows:,}."
    columns = ("set", "step", *map(CURVE_NAMES.__getitem__, scores), "samples", "seconds")
    yield table(("run", *columns) if len(runs) > 1 else columns, rows, caption)


def score_text(score: str, value: float) -> str:
    """Format a score: a loss as a number, all others in percent."""
    return number(value, percent=score != "loss")


def of_step(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and a field of their StepLines."""
    return metrics.steps_N, metrics.figures[key]


def step_curves(
    runs: Sequence[LoggedRun],
    keys: dict[str, str],
    read: Callable[[RunMetrics, str], tuple[np.ndarray, np.ndarray]],
    steady: bool = False,
) -> tuple[Curve, ...]:
    """Return the curve of each run and, if it has enough steps, the smoothed curve over it. A
    comparison shows only the first key. `read` returns steps and values of a key."""
    curves = []
    alone = len(runs) == 1
    for place, run in enumerate(runs):
        for colour, (name, key) in enumerate(keys.items()):
            x_N, y_N = read(run.metrics, key)
            if not alone:
                colour, name = place, run.name
            if steady or len(x_N) < _SMOOTH_FROM:
                curves.append(Curve(name, x_N, y_N, colour, run=place))
            else:
                raw = name if not alone else f"{name}, each step" if len(keys) > 1 else "each step"
                curves.append(Curve(raw, x_N, y_N, colour, faint=True, run=place, in_legend=alone))
                mean = name if len(keys) > 1 or not alone else "smoothed"
                curves.append(Curve(mean, *smooth(x_N, y_N), colour, run=place))
            if not alone:
                break
    return tuple(curves)


def _score_curves(runs: Sequence[LoggedRun], score: str) -> tuple[Curve, ...]:
    """Return the curves of a score for the sets that have it. With a single run, a set has the same
    colour on the whole page."""
    curves = []
    for place, run in enumerate(runs):
        for colour, (name, evaluations) in enumerate(run.metrics.sets().items(), start=1):
            x = np.array([e.step for e in evaluations])
            y = np.array([e.score(score) for e in evaluations])
            if len(runs) > 1:
                colour, name = place, f"{run.name}: {name}"
            curves.append(Curve(name, x, y, colour, dots=True, run=place))
    return tuple(curve for curve in curves if np.isfinite(curve.y).any())


def _marks(runs: Sequence[LoggedRun], first: float, last: float) -> Iterator[StepMarks]:
    """Yield marks at steps that were not applied, and at steps where a run was resumed."""
    for place, run in enumerate(runs):
        metrics = run.metrics
        not_applied = metrics.steps_N[metrics.skipped_N | metrics.empty_N]
        yield StepMarks("not applied", not_applied, run=place)
        resumes = np.array([start.step for start in metrics.starts[1:]], dtype=float)
        inside = resumes[(resumes > first) & (resumes <= last)]
        yield StepMarks("resumed", inside, tall=True, run=place)


def _rows(
    evaluations: list[EvalLine], scores: Sequence[str], max_rows: int
) -> Iterator[tuple[str, ...]]:
    best = {score: best_of(evaluations, score) for score in scores}
    for i, e in enumerate(evaluations):
        stars = {score: "\u00a0*" if e is best[score] else "" for score in scores}
        if i >= len(evaluations) - max_rows or any(stars.values()):
            texts = (score_text(key, e.score(key)) + stars[key] for key in scores)
            yield (e.name, f"{e.step:,}", *texts, f"{e.samples:,}", number(e.seconds))


def steps_span(runs: Sequence[LoggedRun]) -> tuple[float, float]:
    """Return the first and the last step, which all charts of a page share."""
    steps: list[float] = []
    for run in runs:
        steps += [*run.metrics.steps_N[:1], *run.metrics.steps_N[-1:]]
        steps += [e.step for e in run.metrics.evaluations]
        steps += [line.step for line in run.metrics.samples]
    return float(min(steps)), float(max(steps))
