"""Charts of curves over steps, drawn in the browser by uPlot from data inside the page.

Python decides what is drawn: thinned points, marks, a summary in words. charts.js decides how.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.io.numbers_as_text import CURVE_COLUMNS, number, thin_out
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.markup import Html, json_block, tag
from megatron_vlm.report.sections import Section

_HERE = Path(__file__).parent
CURVE_COLOURS = 6  # in charts.css
_MAX_DOTS = 80
_LOG_FROM = 30  # a chart whose values span this ratio begins with a logarithmic scale


@dataclass(frozen=True)
class Curve:
    """Curve of one figure. A value of nan makes a gap. `faint` is for raw values under a smoothed
    curve."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    faint: bool = False
    dots: bool = False
    run: int = 0
    in_legend: bool = True

    def data(self) -> dict[str, Any]:
        """Return the curve as charts.js reads it."""
        x, y = thin_out(self.x, self.y)
        return {
            "name": escape_controls(self.name),
            "x": [round(float(v), 1) for v in x],
            "y": [float(f"{v:.6g}") if np.isfinite(v) else None for v in y],
            "colour": f"c{self.colour % CURVE_COLOURS}",
            "dash": self.colour >= CURVE_COLOURS,
            "faint": self.faint,
            "dots": self.dots and len(x) <= _MAX_DOTS,
            "run": self.run,
            "legend": self.in_legend,
        }


@dataclass(frozen=True)
class StepMarks:
    """Steps with a stroke at the foot of the chart, or with a line over its whole height."""

    name: str
    x: np.ndarray
    tall: bool = False
    run: int = 0

    @property
    def kind(self) -> str:
        return "tall" if self.tall else "short"


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


@dataclass(frozen=True)
class Charts(Section):
    """Charts over the steps from `first` to `last`, next to each other."""

    charts: Sequence[Chart]
    first: float
    last: float


@dataclass(frozen=True)
class RunSwitches(Section):
    """Legend of all charts of a page, whose buttons show or hide the curves of a run."""

    names: Sequence[str]


def chart_figure(chart: Chart, first: float, last: float) -> Html:
    """Return the figure of a chart over the steps from `first` to `last`."""
    if not chart.shown:
        nothing = tag("p", "no number was logged", class_="quiet")
        return tag("figure", tag("b", chart.title), nothing, class_="card chart")
    summary = [*curve_summaries(chart)]
    words = "; ".join(f"{name}: {text}" for name, text in summary)
    plot = tag("div", class_="plot", role="img", aria_label=f"{chart.title}: {words}")
    title = tag("div", tag("b", chart.title), " ", tag("span", chart.unit, class_="quiet"))
    # A mark has one entry in the legend, however many runs have it.
    marks = {m.name: tag("span", tag("i", class_=m.kind), m.name) for m in chart.marks if len(m.x)}
    keys = tag("div", *marks.values(), class_="keys quiet")
    is_alone = len({curve.run for curve in chart.shown}) == 1
    caption = [tag("figcaption", summary[0][1])] if is_alone else []
    data = json_block(chart_data(chart, first, last))
    return tag("figure", title, keys, plot, *caption, data, class_="card chart")


def curve_summaries(chart: Chart) -> Iterator[tuple[str, str]]:
    """Yield the name of each curve, with its last, lowest and highest value in words; of smoothed
    curves, those of their raw values."""
    for curve in [each for each in chart.shown if each.faint] or chart.shown:
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
    """Return the styles that a page with charts needs in addition to those of all pages."""
    return (_HERE / "uplot" / "uPlot.min.css").read_text() + (_HERE / "charts.css").read_text()


def chart_data(chart: Chart, first: float, last: float) -> dict[str, Any]:
    """Return a chart with a number as charts.js reads it."""
    values = np.concatenate([curve.y for curve in chart.shown])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
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
