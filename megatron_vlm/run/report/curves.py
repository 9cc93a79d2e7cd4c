"""Which curves a run's page has: the loss first, what explains it, what it cost, what it scored."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_vlm.display.charts import Chart, Marks, Series, draw
from megatron_vlm.display.html import Html, table, tag
from megatron_vlm.display.scales import number, smooth
from megatron_vlm.run.report.metrics import Evaluation, RunMetrics, best_of

_MOST_ROWS = 200  # of the table of evaluations
_SMOOTH_FROM = 80  # steps
NAMES = {
    "loss": "loss",
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "ranking": "ranking",
}


def curve_section(metrics: RunMetrics) -> Iterator[Html]:
    """Curves of what was logged with each step."""
    yield tag("h2", "Curves over steps", id="curves")
    if not len(metrics.steps_N):
        yield tag("p", "No step was logged.", class_="quiet")
        return
    first, last = _span(metrics)
    resumes = np.array([start["step"] for start in metrics.starts[1:]], dtype=float)
    marks = (
        Marks("not applied", metrics.steps_N[metrics.skipped_N]),
        Marks("resumed", resumes[(resumes > first) & (resumes <= last)], tall=True),
    )
    loss = Chart("Loss", _loss_series(metrics), may_log=True, marks=marks, height=300)
    yield draw(loss, first, last)
    yield tag("div", *(draw(chart, first, last) for chart in _small(metrics)), class_="charts")


def score_section(metrics: RunMetrics) -> Iterator[Html]:
    """Curves and a table of each named set; nothing where nothing was evaluated."""
    if not metrics.evaluations:
        return
    yield tag("h2", "Evaluation", id="evaluation")
    charts = []
    for score, name in NAMES.items():
        if series := _score_series(metrics, score):
            chart = Chart(name.capitalize(), series, percent=score != "loss")
            charts.append(draw(chart, *_span(metrics)))
    yield tag("div", *charts, class_="charts")
    most = max(3, _MOST_ROWS // len(metrics.sets()))
    scores = [s for s in NAMES if any(math.isfinite(e.scores[s]) for e in metrics.evaluations)]
    sets = metrics.sets().values()
    rows = [row for evaluations in sets for row in _rows(evaluations, scores, most)]
    caption = "* the best of its set."
    if len(rows) < len(metrics.evaluations):
        caption += f" Of each set, the best and the last {most:,}."
    yield table(
        ("set", "step", *map(NAMES.__getitem__, scores), "samples", "seconds"), rows, caption
    )


def score_text(score: str, value: float) -> str:
    """A loss as it is, the others in percent."""
    return number(value, percent=score != "loss")


def _small(metrics: RunMetrics) -> Iterator[Chart]:
    x, figures = metrics.steps_N, metrics.figures
    yield Chart("Learning rate", (Series("", x, figures["lr"]),))
    yield Chart("Gradient norm", _noisy("", x, figures["grad_norm"]), may_log=True)
    every = _noisy("all", x, figures["tokens_per_s"])
    trained = _noisy("trained", x, figures["trained_tokens_per_s"], 1)
    yield Chart("Tokens", every + trained, "a second")
    if np.nanmax(figures["images_per_s"], initial=0) > 0:
        yield Chart("Images", _noisy("", x, figures["images_per_s"]), "a second")
    yield Chart("Time of a step", _noisy("", x, figures["seconds"]), "seconds", may_log=True)
    yield Chart("Padding", _noisy("", x, figures["padding"]), "of all positions", percent=True)
    if np.isfinite(figures["mfu"]).any():
        yield Chart("MFU", _noisy("", x, figures["mfu"]), "of the peak FLOP/s", percent=True)
    yield Chart("Memory", (Series("", x, figures["memory_gb"]),), "GB")


def _noisy(name: str, x: np.ndarray, y: np.ndarray, colour: int = 0) -> tuple[Series, ...]:
    """Of each step and, where there are enough, the mean around it."""
    if len(x) < _SMOOTH_FROM:
        return (Series(name, x, y, colour),)
    return Series(name, x, y, colour, faint=True), Series(name, *smooth(x, y), colour)


def _loss_series(metrics: RunMetrics) -> tuple[Series, ...]:
    """The training's, and points of each set. Its legend explains the other curves, too."""
    curves = _noisy("training", metrics.steps_N, metrics.figures["loss"])
    if len(curves) == 2:
        raw, mean = curves
        curves = (replace(raw, name="each step"), replace(mean, name="mean around it"))
    return (*curves, *_score_series(metrics, "loss"))


def _score_series(metrics: RunMetrics, score: str) -> tuple[Series, ...]:
    """A score of every set that has it; a set has one colour all over the page."""
    found = []
    for colour, (name, evaluations) in enumerate(metrics.sets().items(), start=1):
        x = np.array([e.step for e in evaluations])
        y = np.array([e.scores[score] for e in evaluations])
        found.append(Series(name, x, y, colour, dots=True))
    return tuple(series for series in found if np.isfinite(series.y).any())


def _rows(
    evaluations: list[Evaluation], scores: Sequence[str], most: int
) -> Iterator[tuple[str, ...]]:
    best = {score: best_of(evaluations, score) for score in scores}
    for i, e in enumerate(evaluations):
        stars = {score: "\u00a0*" if e is best[score] else "" for score in scores}
        if i >= len(evaluations) - most or any(stars.values()):
            texts = (score_text(key, e.scores[key]) + stars[key] for key in scores)
            yield (e.name, f"{e.step:,}", *texts, f"{e.samples:,}", number(e.seconds))


def _span(metrics: RunMetrics) -> tuple[float, float]:
    """All curves have the same steps across."""
    steps = [*metrics.steps_N[:1], *metrics.steps_N[-1:], *(e.step for e in metrics.evaluations)]
    return float(min(steps)), float(max(steps))
