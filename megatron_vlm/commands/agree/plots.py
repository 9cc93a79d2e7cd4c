"""The two plots of an agreement, as SVG: log-probs against each other, and their differences."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_vlm.commands.agree.compare import Agreement
from megatron_vlm.report.html import Html, tag

_MAX_POINTS = 4000  # points; the largest differences are always among them
_WIDE, _HIGH = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 468, 14, 280


def plots(agreement: Agreement) -> Html:
    """Return both plots, next to each other."""
    points = _points(agreement)
    return tag("div", _against(points), _differences(points, agreement.bound), class_="charts")


def _points(agreement: Agreement) -> np.ndarray:
    """Return finite values [tokens, 3]: the trainer's log-prob, the engine's, their difference."""
    tokens = [token for prompt in agreement.prompts for token in prompt.tokens]
    points = np.array([(t.trainer, t.engine, t.difference) for t in tokens]).reshape(-1, 3)
    points = points[np.isfinite(points).all(axis=1)]
    points = points[np.argsort(-points[:, 2], kind="stable")]
    if len(points) <= _MAX_POINTS:
        return points
    rest = np.linspace(_MAX_POINTS // 2, len(points) - 1, _MAX_POINTS // 2).astype(int)
    return np.concatenate([points[: _MAX_POINTS // 2], points[rest]])


def _against(points: np.ndarray) -> Html:
    low, high = _span(points[:, :2])
    ticks = _round_numbers(low, high)
    marks = [_mark(each, _place(each, low, high, across=True), True) for each in ticks]
    marks += [_mark(each, _place(each, low, high, across=False), False) for each in ticks]
    line = tag("line", x1=_LEFT, y1=_BOTTOM, x2=_RIGHT, y2=_TOP, class_="equal")
    dots = [
        _dot(_place(x, low, high, True), _place(y, low, high, False), x, y, difference)
        for x, y, difference in points.tolist()
    ]
    words = f"{len(points):,} log-probs by the engine against those by the trainer"
    return _figure("by the engine, against by the trainer", [*marks, line, *dots], words)


def _differences(points: np.ndarray, bound: float) -> Html:
    """Plot the differences on a logarithmic scale. A difference of 0 lies on the lowest line."""
    low, high = _span(points[:, 0])
    sizes = [size for size in (*points[:, 2].tolist(), bound) if size > 0]
    bottom, top = math.floor(math.log10(min(sizes))) - 1, math.ceil(math.log10(max(sizes)) + 0.05)

    def height(size: float) -> float:
        return _place(max(math.log10(size), bottom) if size > 0 else bottom, bottom, top, False)

    marks = [_mark(each, _place(each, low, high, True), True) for each in _round_numbers(low, high)]
    marks += [
        _mark(power, _place(power, bottom, top, False), False, f"1e{power}" if i else "0")
        for i, power in enumerate(range(bottom, top + 1))
    ]
    y = f"{height(bound):.1f}"
    limit = tag("line", x1=_LEFT, y1=y, x2=_RIGHT, y2=y, class_="bound")
    name = tag("text", f"bound {bound:g}", x=_RIGHT, y=f"{height(bound) - 5:.1f}", class_="end")
    dots = [
        _dot(_place(x, low, high, True), height(difference), x, y, difference)
        for x, y, difference in points.tolist()
    ]
    words = f"differences of {len(points):,} log-probs, and the bound {bound:g}"
    parts = [*marks, limit, *dots, name]
    return _figure("difference, against the log-prob by the trainer", parts, words)


def _figure(title: str, parts: Sequence[Html], words: str) -> Html:
    frame = [
        tag("line", x1=_LEFT, y1=_BOTTOM, x2=_RIGHT, y2=_BOTTOM),
        tag("line", x1=_LEFT, y1=_TOP, x2=_LEFT, y2=_BOTTOM),
    ]
    label = tag("text", "log-prob by the trainer", x=(_LEFT + _RIGHT) // 2, y=312, class_="middle")
    size = f"0 0 {_WIDE} {_HIGH}"
    svg = tag("svg", *frame, *parts, label, viewBox=size, role="img", aria_label=words)
    return tag("figure", tag("b", title), svg, class_="card")


def _dot(x: float, y: float, trainer_value: float, engine_value: float, difference: float) -> Html:
    label = f"trainer {trainer_value:.4f}, engine {engine_value:.4f}, difference {difference:.1e}"
    return tag("circle", tag("title", label), cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5)


def _mark(value: float, place: float, across: bool, text: str | None = None) -> Html:
    """Return a number at one of the axes, with its line of the grid."""
    text = text or f"{value:g}"
    if across:
        line = tag("line", x1=f"{place:.1f}", x2=f"{place:.1f}", y1=_TOP, y2=_BOTTOM, class_="grid")
        return tag("g", line, tag("text", text, x=f"{place:.1f}", y=_BOTTOM + 15, class_="middle"))
    line = tag("line", x1=_LEFT, x2=_RIGHT, y1=f"{place:.1f}", y2=f"{place:.1f}", class_="grid")
    return tag("g", line, tag("text", text, x=_LEFT - 6, y=f"{place + 4:.1f}", class_="end"))


def _place(value: float, low: float, high: float, across: bool) -> float:
    share = (value - low) / (high - low)
    if across:
        return _LEFT + share * (_RIGHT - _LEFT)
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _span(values: np.ndarray) -> tuple[float, float]:
    """Return a range slightly larger than that of the values. It is never empty."""
    if not values.size:
        return -1.0, 0.0
    low, high = float(values.min()), float(values.max())
    room = max(0.04 * (high - low), 0.05)
    return low - room, high + room


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers, which are 1, 2 or 5 times a power of ten apart."""
    min_step = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= min_step)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]
