"""Numbers on their way into a chart: ticks that read well, and fewer points that show the same."""

import math
from dataclasses import dataclass

import numpy as np

COLUMNS = 600  # that a curve is thinned to
# From here up a range of positive values is better seen on a logarithmic scale.
_LOG_FROM = 30


@dataclass(frozen=True)
class Scale:
    """From values to parts of an axis, and the values that get a tick."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return np.log(values / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)


def step_scale(first: float, last: float) -> Scale:
    """From the first to the last step, ticks at whole numbers between."""
    if last <= first:
        first, last = first - 1, first + 1
    step = max(1.0, nice_step((last - first) / 5))
    places = range(max(0, math.ceil(first / step)), math.floor(last / step) + 1)
    return Scale(first, last, tuple((i * step, tick_label(i * step, step, last)) for i in places))


def value_scale(values: np.ndarray, may_log: bool = False, percent: bool = False) -> Scale:
    """Round ends around all finite values, of which there is at least one."""
    finite = values[np.isfinite(values)] * (100 if percent else 1)
    low, high = float(finite.min()), float(finite.max())
    if may_log and low > 0 and high >= _LOG_FROM * low:
        return _log_scale(low, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    if 0 < low <= high / 2:
        low = 0.0
    step = nice_step((high - low) / 6)
    places = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    largest = max(abs(places[0]), abs(places[-1])) * step
    unit, sign = (100, "%") if percent else (1, "")
    ticks = tuple((i * step / unit, tick_label(i * step, step, largest) + sign) for i in places)
    return Scale(ticks[0][0], ticks[-1][0], ticks)


def _log_scale(low: float, high: float) -> Scale:
    """Ends at 1, 2 or 5 times a power of ten. Ticks at those, or at powers alone."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**k for k in decades for m in (1, 2, 5)]
    start = max(v for v in values if v <= low * (1 + 1e-9))
    end = min(v for v in values if v >= high * (1 - 1e-9))
    ticks = [v for v in values if start <= v <= end]
    if len(ticks) > 9:
        ticks = [10.0**k for k in decades if start <= 10.0**k <= end]
        ticks = ticks[:: math.ceil(len(ticks) / 6)]
    return Scale(start, end, tuple((v, tick_label(v, v, v)) for v in ticks), log=True)


def nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def tick_label(value: float, step: float, largest: float) -> str:
    """As many digits as tell neighbouring ticks apart, in the unit of the largest: 0.25, 5k, 20k,
    1.5e-5."""
    if not value:
        return "0"
    size, step_size, top = (
        math.floor(math.log10(abs(v)) + 1e-9) for v in (value, step, max(abs(largest), abs(value)))
    )
    if 4 <= top < 15:
        power = top // 3 * 3
        unit = {3: "k", 6: "M", 9: "G", 12: "T"}[power]
        return f"{value / 10**power:.{max(0, power - step_size)}f}{unit}"
    if -4 < size < 4:
        return f"{value:.{max(0, -step_size)}f}"
    return f"{value / 10.0**size:.{max(0, size - step_size)}f}e{size}"


def number(value: float, percent: bool = False) -> str:
    """Four digits, or all of a large number; - where there is none."""
    if not math.isfinite(value):
        return "-"
    if percent:
        return f"{100 * value:.1f}%" if abs(value) >= 0.01 else f"{100 * value:.2f}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """The first and last point, and of each column the lowest and the highest one."""
    if len(x) <= 2 * columns:
        return x, y
    place = ((x - x[0]) / (x[-1] - x[0]) * columns).astype(np.int64).clip(max=columns - 1)
    kept = {0, len(x) - 1}
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(place)) + 1):
        finite = part[np.isfinite(y[part])]
        if len(finite):
            kept |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            kept.add(int(part[0]))
    rows = np.array(sorted(kept))
    return x[rows], y[rows]


def smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of a fortieth of the curve around each point, or around each column of a long curve.
    Sums of neighbours only: a running total would lose a small loss behind a large one."""
    finite = np.isfinite(y)
    x, y = x[finite].astype(float), y[finite]
    if not len(x):
        return x, y
    starts = np.unique(np.linspace(0, len(x), COLUMNS, endpoint=False).astype(np.int64))
    counts = np.diff([*starts, len(x)])
    window = np.ones(2 * (len(starts) // 80) + 1)
    sums, total = (np.convolve(v, window, "same") for v in (np.add.reduceat(y, starts), counts))
    return np.add.reduceat(x, starts) / counts, sums / total
