"""Pictures of a report as inline SVG: histograms, points over two axes, pipelines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.io.printable import show_count
from megatron_vlm.report.markup import Html, tag
from megatron_vlm.report.sections import Bars, Scatter, TimeBox, Timeline

_MAX_BARS = 24


def bars_svg(bars: Bars) -> Html:
    """Return a histogram of 320 x 130."""
    start, step, counts = bins(bars.values)
    width = min(312 / len(counts), 44)
    drawn = []
    for place, count in enumerate(counts):
        first = start + place * step
        span = f"{first:,}" if step == 1 else f"{first:,} to {first + step - 1:,}"
        tall = 84 * count / max(counts)
        rect = _rect(4 + place * width, 104 - tall, width - 1.5, tall)
        drawn.append(tag("g", tag("title", f"{span}: {show_count(count, 'sample')}"), rect))
    end = 4 + len(counts) * width
    last = start + len(counts) * step - 1
    labels = [tag("text", f"{start:,}", x=4, y=120)]
    if last > start:
        # Below few bars there is no room for both numbers, so the last one begins behind them.
        room = dict(x=f"{end:.2f}", text_anchor="end") if end > 110 else dict(x=f"{end + 30:.2f}")
        labels.append(tag("text", f"to {last:,}" if end <= 110 else f"{last:,}", y=120, **room))
    labels.append(tag("text", f"tallest bar: {show_count(max(counts), 'sample')}", x=4, y=12))
    line = tag("line", x1=4, y1=104.5, x2=316, y2=104.5, class_="grid")
    return tag("svg", *drawn, line, *labels, viewBox="0 0 320 130", role="img")


def bins(values: np.ndarray) -> tuple[int, int, list[int]]:
    """Return the start of the first bin, the width of the bins (1, 2 or 5 times a power of ten),
    and the number of values in each bin."""
    low, high = int(values.min()), int(values.max())
    min_step = math.ceil((high - low + 1) / _MAX_BARS)
    step = next(m * 10**k for k in range(20) for m in (1, 2, 5) if m * 10**k >= min_step)
    start = low // step * step
    counts: list[int] = np.bincount((values - start) // step).tolist()
    return start, step, counts


_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 468, 14, 280


@dataclass(frozen=True)
class Axis:
    """Map from values to places between two ends, with the values that get a number."""

    low: float
    high: float
    start: int
    end: int
    ticks: Sequence[tuple[float, str]]

    def __call__(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}"

    def grid(self) -> Iterator[Html]:
        """Yield a line of the grid and a number for each tick."""
        for value, text in self.ticks:
            place = self(value)
            if self.start == _LEFT:
                ends = dict(x1=place, x2=place, y1=_TOP, y2=_BOTTOM)
                number = tag("text", text, x=place, y=_BOTTOM + 15, text_anchor="middle")
            else:
                ends = dict(x1=_LEFT, x2=_RIGHT, y1=place, y2=place)
                number = tag("text", text, x=_LEFT - 6, y=place, dy=4, text_anchor="end")
            yield tag("g", tag("line", **ends, class_="grid"), number)


def scatter_svg(scatter: Scatter) -> Html:
    """Draw every point. On a logarithmic scale, a value of 0 lies on the lowest line."""
    xs, ys = [x for x, _ in scatter.points], [y for _, y in scatter.points]
    bound = scatter.bound
    low, high = _span(xs if bound is not None else [*xs, *ys])
    ticks = _round_numbers(low, high)
    across = Axis(low, high, _LEFT, _RIGHT, ticks)
    if bound is None:
        up = Axis(low, high, _BOTTOM, _TOP, ticks)
        lines = [tag("line", x1=_LEFT, y1=_BOTTOM, x2=_RIGHT, y2=_TOP, class_="equal")]
    else:
        sizes = [size for size in (*ys, bound) if size > 0]
        lowest = math.floor(math.log10(min(sizes))) - 1
        highest = math.ceil(math.log10(max(sizes)) + 0.05)
        ticks = [(power, f"1e{power}") for power in range(lowest + 1, highest + 1)]
        up = Axis(lowest, highest, _BOTTOM, _TOP, [(lowest, "0"), *ticks])
        ys = [max(math.log10(size), lowest) if size > 0 else lowest for size in ys]
        y = up(math.log10(bound))
        name = tag("text", f"bound {bound:g}", x=_RIGHT, y=y, dy=-5, text_anchor="end")
        lines = [tag("line", x1=_LEFT, y1=y, x2=_RIGHT, y2=y, class_="bound"), name]
    dots = [
        tag("circle", tag("title", label), cx=across(x), cy=up(y), r=2.5)
        for x, y, label in zip(xs, ys, scatter.labels, strict=True)
    ]
    frame = [
        tag("line", x1=_LEFT, y1=_BOTTOM, x2=_RIGHT, y2=_BOTTOM),
        tag("line", x1=_LEFT, y1=_TOP, x2=_LEFT, y2=_BOTTOM),
        tag("text", scatter.x_label, x=(_LEFT + _RIGHT) // 2, y=312, text_anchor="middle"),
    ]
    parts = [*frame, *across.grid(), *up.grid(), *dots, *lines]
    return tag("svg", *parts, viewBox="0 0 480 320", role="img", aria_label=scatter.words)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return a range slightly larger than that of the values. It is never empty."""
    if not values:
        return -1.0, 0.0
    low, high = min(values), max(values)
    room = max(0.04 * (high - low), 0.05)
    return low - room, high + room


def _round_numbers(low: float, high: float) -> list[tuple[float, str]]:
    """Return about five round numbers, which are 1, 2 or 5 times a power of ten apart."""
    min_step = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= min_step)
    values = [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(value, f"{value:g}") for value in values]


_TIME_WIDE, _NAMES, _ROW = 1000, 66, 30
_MIN_NUMBERED_WIDTH = 15  # units of width that a number needs


def timeline_svg(timeline: Timeline) -> Html:
    """Draw a row for each stage, and a box for each forward and backward."""
    scale = (_TIME_WIDE - _NAMES) / timeline.end
    parts: list[Html] = []
    for row in range(timeline.rows):
        top = _row_top(row)
        parts.append(tag("text", f"stage {row}", x=0, y=top + 17))
        parts.append(_rect(_NAMES, top, _TIME_WIDE - _NAMES, _ROW - 6, "w"))
    parts += [_time_box(box, scale) for box in timeline.boxes]
    foot = _row_top(timeline.rows) + 16
    parts.append(tag("text", "0", x=_NAMES, y=foot))
    parts.append(tag("text", f"{timeline.end:.2f} s", x=_TIME_WIDE, y=foot, text_anchor="end"))
    shown = {"viewBox": f"0 0 {_TIME_WIDE} {foot + 8}", "role": "img"}
    return tag("svg", *parts, **shown, aria_label=timeline.words, class_="timeline")


def _time_box(box: TimeBox, scale: float) -> Html:
    left, wide = _NAMES + box.start * scale, (box.end - box.start) * scale
    top, kind = _row_top(box.row), "forward" if box.is_forward else "backward"
    label = f"{kind} of micro-batch {box.number} on stage {box.row}: {box.end - box.start:.3f} s, "
    label += f"from {box.start:.3f} to {box.end:.3f} s"
    rect = _rect(left, top, wide - min(0.8, wide / 4), _ROW - 6, kind[0])
    middle = dict(x=f"{left + wide / 2:.2f}", y=top + 16, text_anchor="middle")
    number = [tag("text", str(box.number), **middle)] if wide >= _MIN_NUMBERED_WIDTH else []
    return tag("g", tag("title", label), rect, *number)


def _row_top(row: int) -> int:
    return 8 + row * _ROW


def _rect(x: float, y: float, width: float, height: float, kind: str = "bar") -> Html:
    box = {"x": x, "y": y, "width": width, "height": height}
    return tag("rect", **{name: f"{value:.2f}" for name, value in box.items()}, class_=kind)
