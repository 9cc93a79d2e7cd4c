"""Curves as inline SVG that keeps its text at one size while the curves stretch with the page.

Places across are percent and places down are pixels, so ticks stay readable at any width; the
curves live in an inner SVG that is stretched, with strokes that are not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_vlm.display.html import Html, tag
from megatron_vlm.display.scales import COLUMNS, Scale, number, step_scale, thin, value_scale

_MOST_DOTS = 80
_WIDE = 1000  # of the inner SVG


@dataclass(frozen=True)
class Series:
    """A curve: nan makes a gap. One without a name is what the title says, of two with one name
    the legend has the last. Faint is for raw values below a smoothed curve."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    faint: bool = False
    dots: bool = False

    @property
    def kind(self) -> str:
        return "dot" if self.dots else "faint" if self.faint else "line"

    @property
    def css(self) -> str:
        return f"c{self.colour % 6}"


@dataclass(frozen=True)
class Marks:
    """Steps to be marked: by a stroke at the foot of the chart, or by a line over its height."""

    name: str
    x: np.ndarray
    tall: bool = False

    @property
    def kind(self) -> str:
        return "tall" if self.tall else "short"


@dataclass(frozen=True)
class Chart:
    """Curves over steps. `unit` stands behind the title; percent is of values that are parts."""

    title: str
    series: tuple[Series, ...]
    unit: str = ""
    percent: bool = False
    may_log: bool = False  # where values lie far apart
    marks: tuple[Marks, ...] = ()
    height: int = 150


def draw(chart: Chart, first: float, last: float) -> Html:
    """A figure with title, legend and curves, over the steps from `first` to `last`."""
    shown = [series for series in chart.series if np.isfinite(series.y).any()]
    if not shown:
        nothing = tag("p", "no number was logged", class_="quiet")
        return tag("figure", tag("b", chart.title), nothing, class_="card chart")
    values = np.concatenate([series.y for series in shown])
    x_scale = step_scale(first, last)
    y_scale = value_scale(values, chart.may_log, chart.percent)
    curves = tag(
        "svg",
        *(_curve(series, chart, x_scale, y_scale) for series in shown),
        viewBox=f"0 0 {_WIDE} {chart.height}",
        preserveAspectRatio="none",
        height=chart.height,
    )
    inner = [*_grid(x_scale, y_scale, chart.height), *_marks(chart, x_scale), curves]
    summary = "; ".join(_summary(series, chart) for series in shown)
    label = f"{chart.title}: {summary}"
    plot = tag("svg", *inner, role="img", aria_label=label, height=chart.height + 24)
    unit = ", ".join([chart.unit] * bool(chart.unit) + ["log scale"] * y_scale.log)
    title = tag("div", tag("b", chart.title), " ", tag("span", unit, class_="quiet"))
    keys = tag("div", *_legend(chart, shown), class_="keys quiet")
    caption = tag("figcaption", _summary(shown[0], chart))
    return tag("figure", title, keys, tag("div", plot, class_="plot"), caption, class_="card chart")


def _summary(series: Series, chart: Chart) -> str:
    """The last, the lowest and the highest value of a curve, and where they are."""
    finite = np.isfinite(series.y)
    steps, values = series.x[finite], series.y[finite]
    places = {"last": -1, "lowest": int(values.argmin()), "highest": int(values.argmax())}
    name = f"{series.name}: " if series.name else ""
    return name + ", ".join(
        f"{word} {number(float(values[i]), chart.percent)} at {steps[i]:,.0f}"
        for word, i in places.items()
    )


def _curve(series: Series, chart: Chart, x_scale: Scale, y_scale: Scale) -> Html:
    x, y = thin(series.x, series.y)
    across, down = _WIDE * x_scale(x), chart.height * (1 - y_scale(y))
    points = [f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True)]
    gaps = [-1, *np.flatnonzero(~np.isfinite(down)).tolist(), len(x)]
    parts = [points[i + 1 : j] for i, j in pairwise(gaps) if j - i > 1]
    path = "".join(f"M{' '.join(part)}" for part in parts if len(part) > 1)
    # A stroke of no length: its round cap stays round where the SVG is stretched.
    lone = "".join(f"M{part[0]}h0" for part in parts if len(part) == 1)
    line = tag("path", d=path, class_="faint" if series.faint else "line")
    dots = [tag("path", d=lone, class_="lone")] if lone else []
    if series.dots and len(x) <= _MOST_DOTS:
        for i in np.flatnonzero(np.isfinite(down)):
            text = f"{series.name} at {x[i]:,.0f}: {number(float(y[i]), chart.percent)}"
            dot = tag("path", d=f"M{points[i]}h0", class_="dot")
            dots.append(tag("g", tag("title", text), dot))
    return tag("g", line, *dots, class_=series.css)


def _grid(x_scale: Scale, y_scale: Scale, height: int) -> Iterator[Html]:
    for value, label in y_scale.ticks:
        y = f"{height * (1 - float(y_scale(np.array(value)))):.1f}"
        yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
        yield tag("text", label, x=-8, y=y, dy="0.35em", text_anchor="end")
    for value, label in x_scale.ticks:
        x = f"{100 * float(x_scale(np.array(value))):.2f}%"
        yield tag("line", x1=x, x2=x, y1=height, y2=height + 4, class_="grid")
        yield tag("text", label, x=x, y=height + 18, text_anchor="middle")


def _marks(chart: Chart, x_scale: Scale) -> Iterator[Html]:
    for marks in chart.marks:
        top = 0 if marks.tall else chart.height - 9
        for place in np.unique(np.round(x_scale(marks.x) * COLUMNS)) / COLUMNS:
            x = f"{100 * place:.2f}%"
            yield tag("line", x1=x, x2=x, y1=top, y2=chart.height, class_=marks.kind)


def _legend(chart: Chart, shown: list[Series]) -> Iterator[Html]:
    for name, series in {series.name: series for series in shown if series.name}.items():
        yield tag("span", tag("i", class_=f"{series.kind} {series.css}"), name)
    for marks in chart.marks:
        if len(marks.x):
            yield tag("span", tag("i", class_=marks.kind), marks.name)


CHART_CSS = """
:root {
  --c0: #2f6ba8; --c1: #c05a12; --c2: #2c8258; --c3: #8550a8; --c4: #a3274f; --c5: #6f6a1e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --c0: #7db1e6; --c1: #f29a5c; --c2: #63c393; --c3: #bd96de; --c4: #f08aa8; --c5: #c9c25e;
  }
}
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.chart { margin: 0 0 1.25rem; min-width: 0; }
.chart b { font-weight: 600; }
.chart figcaption { font-size: .8rem; line-height: 1.4; margin-top: .4rem; }
.keys { display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
.keys span { display: inline-flex; align-items: center; gap: .4rem; }
.keys i { width: 18px; border-top: 2px solid; }
.keys i.faint { opacity: .45; border-top-width: 1px; }
.keys i.dot { width: 9px; height: 9px; border: 0; border-radius: 5px; background: currentColor; }
.keys i.short { width: 2px; height: 9px; border: 0; background: var(--alarm); }
.keys i.tall { width: 0; height: 13px; border: 0; border-left: 1px dashed; }
.plot { padding: .7rem .9rem 0 3.1rem; }
.plot svg { display: block; width: 100%; overflow: visible; }
.plot text { fill: var(--quiet); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.plot path {
  fill: none; stroke: currentColor; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round;
}
.plot .line { stroke-width: 2px; }
.plot .faint { stroke-width: 1px; opacity: .45; }
.plot .lone { stroke-width: 5px; }
.plot .dot { stroke-width: 8px; }
.plot .grid { stroke: var(--line); }
.plot .short { stroke: var(--alarm); stroke-width: 2px; }
.plot .tall { stroke: var(--quiet); stroke-dasharray: 3 3; }
"""
