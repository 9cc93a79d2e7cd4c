"""Numbers for a page: as text, and as fewer points that show the same curve."""

import math

import numpy as np

CURVE_COLUMNS = 600  # width of a thinned curve


def number(value: float, percent: bool = False) -> str:
    """Return a number with four digits, or with all digits where it is large; - where it is not
    finite."""
    if not math.isfinite(value):
        return "-"
    if percent:
        return f"{100 * value:.1f}%" if abs(value) >= 0.01 else f"{100 * value:.2f}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def time_spent(seconds: float) -> str:
    """Return a duration in its two largest units: 4,000 s as 1 h 6 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 24 * 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


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


def smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of a fortieth of the curve around each point, or around each column of a long
    curve. Only neighbours are summed: a running total would lose a small loss after a large one."""
    finite = np.isfinite(y)
    x, y = x[finite].astype(float), y[finite]
    if not len(x):
        return x, y
    starts = np.unique(np.linspace(0, len(x), CURVE_COLUMNS, endpoint=False).astype(np.int64))
    counts = np.diff([*starts, len(x)])
    window = np.ones(2 * (len(starts) // 80) + 1)
    sums, total = (np.convolve(v, window, "same") for v in (np.add.reduceat(y, starts), counts))
    return np.add.reduceat(x, starts) / counts, sums / total
