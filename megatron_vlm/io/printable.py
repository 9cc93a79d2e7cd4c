"""Text for readers: texts from outside whose control characters are spelled out, and numbers."""

import math
import re
import textwrap

# These characters could steer a terminal, reverse the text around them, or fail to be written.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufffe\uffff]"
)


def show_count(count: int, noun: str) -> str:
    """Return a number with its noun: 1 sample, 2,000 processes."""
    return f"{count:,} {noun}" + ("es" if noun.endswith(("s", "x")) else "s") * (count != 1)


def escape_controls(text: str) -> str:
    """Return the text with its control characters spelled out."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def number(value: float, percent: bool = False) -> str:
    """Return a number with four digits, or all digits of a large one; - where it is not finite."""
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


def wrap_words(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text as lines, which break between words alone. `first` and `rest` begin them."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size_text(size: float) -> str:
    """Format bytes in a readable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"
