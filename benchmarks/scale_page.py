"""Output of a simulation: tables for the terminal and docs/scaling.md, and docs/scaling.svg."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich
import rich.table

from megatron_vlm.data.batches.balance import Balance
from megatron_vlm.report.markup import Html, tag

NAMES = ("rows in order, 4 each", "rows in order, 1 each", "our plan")


@dataclass(frozen=True)
class LogScale:
    """Map from positive values to fractions of an axis, with the values that get a tick."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return np.log(values / self.low) / math.log(self.high / self.low)


def scale_around(values: np.ndarray) -> LogScale:
    """Return a scale that ends at 1, 2 or 5 times a power of ten, with ticks at such values, or
    only at the powers."""
    low, high = float(values.min()), float(values.max())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_ones = [m * 10.0**k for k in decades for m in (1, 2, 5)]
    start = max(v for v in round_ones if v <= low * (1 + 1e-9))
    end = min(v for v in round_ones if v >= high * (1 - 1e-9))
    ticks = [v for v in round_ones if start <= v <= end]
    if len(ticks) > 9:
        ticks = [10.0**k for k in decades if start <= 10.0**k <= end]
    return LogScale(start, end, tuple((v, f"{v:g}") for v in ticks))


@dataclass(frozen=True)
class Table:
    """Table for the terminal and the document."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def show(self) -> None:
        table = rich.table.Table(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        rich.print(table)

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Point:
    """A step at one number of ranks, with seconds and balances in the order of NAMES."""

    ranks: int
    seconds: tuple[float, ...]
    balances: tuple[Balance, ...]
    perfect: float  # no padding, no waiting, no bubble; the same exchange
    plan_s: float  # measured
    last_s: float  # backward of the last micro-batch in the package's plan, mean over the replicas
    costliest_s: float  # backward of the first one


CSS = """
text { font: 12px system-ui, sans-serif; fill: #6a6f78; } .name { font-weight: 600; }
path { fill: none; stroke: currentColor; stroke-width: 2; } line { stroke: #8885; }
.c0 { color: #c05a12; } .c1 { color: #8550a8; } .c2 { color: #2f6ba8; } .c3 { color: #2c8258; }
"""


def panel(title: str, points: Sequence[Point], left: int, top: int) -> Html:
    """Plot the seconds of a step over ranks, both on logarithmic scales."""
    wide, high, ranks = 330, 180, [p.ranks for p in points]
    curves = [*zip(*(p.seconds for p in points), strict=True), [p.perfect for p in points]]
    across = LogScale(ranks[0], max(ranks[-1], 2 * ranks[0]), tuple((r, f"{r}") for r in ranks))
    down = scale_around(np.array(curves))
    parts = [tag("text", title, x=0, y=-10, class_="name")]
    for value, label in down.ticks:
        y = f"{high * (1 - float(down(np.array(value)))):.1f}"
        parts.append(tag("line", x1=0, x2=wide, y1=y, y2=y))
        parts.append(tag("text", label, x=-6, y=y, dy="0.35em", text_anchor="end"))
    for value, label in across.ticks:
        x = f"{wide * float(across(np.array(value))):.1f}"
        parts.append(tag("text", label, x=x, y=high + 18, text_anchor="middle"))
    for number, curve in enumerate(curves):
        x_s, y_s = wide * across(np.array(ranks)), high * (1 - down(np.array(curve)))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_s, y_s, strict=True))
        parts.append(tag("path", d=f"M{line}", class_=f"c{number}"))
    return tag("g", *parts, transform=f"translate({left} {top})")


def picture(panels: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Return a self-contained SVG file."""
    parts = [Html(f"<style>{CSS}</style>"), tag("text", "Simulated seconds of a step", x=40, y=22)]
    for number, name in enumerate((*NAMES, "perfect")):
        x = 225 + 165 * number
        parts.append(tag("path", d=f"M{x} 18h18", class_=f"c{number}"))
        parts.append(tag("text", name, x=x + 24, y=22))
    for number, (title, points) in enumerate(panels):
        parts.append(panel(title, points, 45 + 410 * (number % 2), 70 + 260 * (number // 2)))
    size = dict(viewBox="0 0 840 560", width=840, height=560, role="img")
    label = "Simulated seconds of a step over data parallel ranks"
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", aria_label=label, **size) + "\n"


def write(folder: Path, tables: Sequence[Table], drawn: str) -> None:
    """Write between the marks of the document, and leave the rest of the document unchanged."""
    document, begin, end = folder / "scaling.md", "<!-- scaling begin -->", "<!-- scaling end -->"
    head, rest = document.read_text().split(begin)
    text = "\n\n".join(table.markdown() for table in tables)
    date = datetime.date.today()
    when = f"Simulated {date} on a 2-core x86 CPU; planning alone was measured, on that CPU."
    document.write_text(f"{head}{begin}\n\n{when}\n\n{text}\n\n{end}{rest.split(end)[1]}")
    (folder / "scaling.svg").write_text(drawn)
