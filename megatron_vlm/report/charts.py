"""Charts of curves over steps, drawn in the browser by uPlot from data inside the page.

Python decides what is drawn: thinned points, marks, a summary in words. charts.js decides how.
Histograms and points over two axes are SVG, which needs no script: their bins and places are here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vlm.io.printable import escape_controls, number
from megatron_vlm.report.sections import Scatter, Section

_HERE = Path(__file__).parent
CURVE_COLOURS = 6  # in charts.css
CURVE_COLUMNS = 600  # width of a thinned curve
_SMOOTH_FROM = 40  # points
_MIN_WINDOW = 10  # points
_MAX_DOTS = 80
_MAX_BARS = 24
_LOG_FROM = 30  # a chart whose values span this ratio begins with a logarithmic scale


@dataclass(frozen=True)
class Curve:
    """Curve of one figure. A value of nan makes a gap. Values that change from step to step are
    smoothed on the page, as much as its reader wants."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    is_smoothed: bool = False
    dots: bool = False
    dashed: bool = False
    run: int = 0

    def data(self) -> dict[str, Any]:
        """Return the curve as charts.js reads it."""
        x, y = thin_out(self.x, self.y)
        data = {
            "name": escape_controls(self.name),
            "x": plain_values(x),
            "y": plain_values(y),
            "colour": f"c{self.colour % CURVE_COLOURS}",
            "dash": self.dashed or self.colour >= CURVE_COLOURS,
            "smooth": self.is_smoothed,
            "dots": self.dots and len(x) <= _MAX_DOTS,
            "run": self.run,
        }
        if self.is_smoothed and np.isfinite(self.y).sum() > CURVE_COLUMNS:
            last, means, counts = column_means(self.x, self.y)
            data["columns"] = [plain_values(last), plain_values(means), counts.tolist()]
        return data


def plain_values(values: np.ndarray) -> list[float | None]:
    """Return numbers of six digits for JSON, or of more for whole numbers."""
    plain = (float(v) if float(v).is_integer() else float(f"{v:.6g}") for v in values.tolist())
    return [v if math.isfinite(v) else None for v in plain]


@dataclass(frozen=True)
class StepMarks:
    """Steps with a stroke at the foot of the chart, or with a line over its whole height."""

    name: str
    x: np.ndarray
    kind: Literal["short", "tall"] = "short"
    run: int = 0


@dataclass(frozen=True)
class Chart:
    """Chart of curves over steps. `percent` is for values that are fractions."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    percent: bool = False
    may_log: bool = False  # begins with a logarithmic scale if its values span _LOG_FROM
    marks: tuple[StepMarks, ...] = ()
    height: int = 150

    @property
    def shown(self) -> list[Curve]:
        """The curves that have a number."""
        return [curve for curve in self.curves if np.isfinite(curve.y).any()]

    @property
    def keys(self) -> dict[str, str]:
        """The kinds of the marks by their names. Marks of several runs may share one."""
        return {mark.name: mark.kind for mark in self.marks if len(mark.x)}


@dataclass(frozen=True)
class Charts(Section):
    """Charts next to each other, over the steps of the span or each over its own steps."""

    charts: Sequence[Chart]
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class RunAxes:
    """Steps of a run, with the tokens and the seconds from its beginning to the end of each."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class ChartControls(Section):
    """Controls of all charts of a page: what is on the x axis, how much is smoothed and, for
    several runs, which of them are shown."""

    names: Sequence[str]
    axes: Sequence[RunAxes]


def control_data(controls: ChartControls) -> dict[str, Any]:
    """Return the controls as charts.js reads them."""
    counts = [len(axes.steps) for axes in controls.axes]
    runs = zip(controls.names, controls.axes, strict=True)
    return {
        "window": smoothing_window(max(counts, default=0)),
        "most": max([2, *(count // 4 for count in counts)]),
        "runs": [_axes_data(name, axes) for name, axes in runs],
    }


def _axes_data(name: str, axes: RunAxes) -> dict[str, Any]:
    """Return the axes of a run at so many steps that the curves between them are straight."""
    places = np.unique(np.linspace(0, len(axes.steps) - 1, CURVE_COLUMNS).astype(np.int64))
    known = {key: values for key, values in vars(axes).items() if len(values)}
    columns = {key: plain_values(values[places]) for key, values in known.items()}
    return {"name": escape_controls(name), **columns}


def curve_summaries(chart: Chart) -> Iterator[tuple[str, str]]:
    """Yield the name of each curve, with its last, lowest and highest value in words."""
    for curve in chart.shown:
        finite = np.isfinite(curve.y)
        steps, values = curve.x[finite], curve.y[finite]
        places = {"last": -1, "lowest": int(values.argmin()), "highest": int(values.argmax())}
        words = (
            f"{word} {number(float(values[i]), chart.percent)} at step {steps[i]:,.0f}"
            for word, i in places.items()
        )
        yield curve.name, ", ".join(words)


def chart_scripts() -> tuple[str, str]:
    """Return the scripts of a page with charts: the library, then charts.js."""
    library = (_HERE / "uplot" / "uPlot.iife.min.js").read_text()
    return library, (_HERE / "charts.js").read_text()


def chart_css() -> str:
    """Return the styles a page with charts needs in addition to the styles of all pages."""
    return (_HERE / "uplot" / "uPlot.min.css").read_text() + (_HERE / "charts.css").read_text()


def chart_data(chart: Chart, span: tuple[float, float] | None = None) -> dict[str, Any]:
    """Return a chart with a number as charts.js reads it."""
    values = np.concatenate([curve.y for curve in chart.shown])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    steps = np.concatenate([curve.x for curve in chart.shown])
    first, last = span or (float(steps.min()), float(steps.max()))
    first, last = (first, last) if last > first else (first - 1, first + 1)
    columns = (last - first) / CURVE_COLUMNS
    return {
        "percent": chart.percent,
        "positive": low > 0,
        "log": chart.may_log and low > 0 and high >= _LOG_FROM * low,
        "span": [first, last],
        "height": chart.height,
        "curves": [curve.data() for curve in chart.shown],
        "marks": [
            {
                "kind": m.kind,
                "x": (np.unique(np.round(m.x / columns)) * columns).tolist(),
                "run": m.run,
            }
            for m in chart.marks
        ],
    }


def thin_out(
    x: np.ndarray, y: np.ndarray, columns: int = CURVE_COLUMNS
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last point, and the lowest and the highest one of each column."""
    if len(x) <= 2 * columns:
        return x, y
    place = ((x - x[0]) / (x[-1] - x[0]) * columns).astype(np.int64).clip(max=columns - 1)
    indices = {0, len(x) - 1}
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(place)) + 1):
        finite = part[np.isfinite(y[part])]
        if len(finite):
            indices |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            indices.add(int(part[0]))
    rows = np.array(sorted(indices))
    return x[rows], y[rows]


def smoothing_window(count: int) -> int:
    """Return the number of points in the mean that smooths a curve of `count` points: 1 for a short
    curve, which is drawn as it is."""
    return max(_MIN_WINDOW, count // 40) if count >= _SMOOTH_FROM else 1


def column_means(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns of a long curve, or its points: the last x, the mean of the finite y, and
    the number of points in the mean."""
    finite = np.isfinite(y)
    x, y = x[finite].astype(float), y[finite]
    if not len(x):
        return x, y, y
    starts = np.unique(np.linspace(0, len(x), CURVE_COLUMNS, endpoint=False).astype(np.int64))
    counts = np.diff([*starts, len(x)])
    return x[starts + counts - 1], np.add.reduceat(y, starts) / counts, counts


def smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means over the window of points, or columns of a long curve, that ends with each,
    where it is whole. It never looks ahead. charts.js draws the same means."""
    x, means, counts = column_means(x, y)
    if not len(x):
        return x, means
    columns = max(1, round(smoothing_window(int(counts.sum())) * len(x) / counts.sum()))
    window = np.ones(columns)
    # Only neighbours are summed: a running total would lose a small loss after a large one.
    sums, total = (np.convolve(values, window, "valid") for values in (means * counts, counts))
    return x[columns - 1 :], sums / total


def bins(values: np.ndarray) -> tuple[int, int, list[int]]:
    """Return the start of the first bin, the width of the bins (1, 2 or 5 times a power of ten),
    and the number of values in each bin."""
    low, high = int(values.min()), int(values.max())
    min_step = math.ceil((high - low + 1) / _MAX_BARS)
    step = next(m * 10**k for k in range(20) for m in (1, 2, 5) if m * 10**k >= min_step)
    start = low // step * step
    counts: list[int] = np.bincount((values - start) // step).tolist()
    return start, step, counts


def scatter_plot(scatter: Scatter) -> dict[str, Any]:
    """Return the places of points, of the numbers of both axes and of the bound in a picture of
    480 x 320. On a logarithmic scale, a value of 0 lies on the lowest line."""
    xs, ys = [x for x, _ in scatter.points], [y for _, y in scatter.points]
    bound = scatter.bound or 0.0
    low, high = _wider_range(xs if bound else [*xs, *ys])
    x_ticks = y_ticks = [(value, f"{value:g}") for value in _round_numbers(low, high)]
    bottom, top = low, high
    if bound:
        logs = [math.log10(size) for size in (*ys, bound) if size > 0]
        bottom, top = math.floor(min(logs)) - 1.0, float(math.ceil(max(logs) + 0.05))
        powers = range(int(bottom) + 1, int(top) + 1)
        y_ticks = [(bottom, "0"), *((float(power), f"1e{power}") for power in powers)]
        ys, bound = [math.log10(y) if y > 0 else bottom for y in ys], math.log10(bound)

    def across(x: float) -> str:
        return f"{52 + 416 * (x - low) / (high - low):.1f}"

    def up(y: float) -> str:
        return f"{280 - 266 * (y - bottom) / (top - bottom):.1f}"

    return {
        "dots": [(across(x), up(y)) for x, y in zip(xs, ys, strict=True)],
        "x_ticks": [(across(value), text) for value, text in x_ticks],
        "y_ticks": [(up(value), text) for value, text in y_ticks],
        "bound": up(bound),
    }


def _wider_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range slightly larger than that of the values. It is never empty."""
    if not values:
        return -1.0, 0.0
    low, high = min(values), max(values)
    room = max(0.04 * (high - low), 0.05)
    return low - room, high + room


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers, which are 1, 2 or 5 times a power of ten apart."""
    min_step = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= min_step)
    return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]
