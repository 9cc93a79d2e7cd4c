"""Numbers for a page: as text, and as fewer points that show the same curve."""

import math

import numpy as np

CURVE_COLUMNS = 600  # width of a thinned curve
_SMOOTH_FROM = 40  # points
_MIN_WINDOW = 10  # points


def number(value: float, percent: bool = False) -> str:
    """Return a number with four digits, or with all digits where it is large; - where it is not
    finite."""
    if not math.isfinite(value):
        return "-"
    if percent:
        return f"{100 * value:.2f}%" if 0 < abs(value) < 0.01 else f"{100 * value:.1f}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short_name(count: int) -> str:
    """Shorten a count: 1,720,574,976 becomes 1.72B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


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
    """Return the mean of each point, or each column of a long curve, and of those before it, as far
    as they are in the window. It never looks ahead; points without a whole window are left out.
    charts.js draws the same means."""
    x, means, counts = column_means(x, y)
    if not len(x):
        return x, means
    columns = max(1, round(smoothing_window(int(counts.sum())) * len(x) / counts.sum()))
    window = np.ones(columns)
    # Only neighbours are summed: a running total would lose a small loss after a large one.
    sums, total = (np.convolve(values, window, "valid") for values in (means * counts, counts))
    return x[columns - 1 :], sums / total
