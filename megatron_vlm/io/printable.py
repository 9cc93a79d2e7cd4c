"""Text from outside, shown as text: in the terminal, in logs and on pages."""

import re

# These characters could steer a terminal, reverse the text around them, or fail to be written.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufffe\uffff]"
)


def show_count(count: int, noun: str) -> str:
    """Return a number with its noun: 1 sample, 2,000 processes."""
    return f"{count:,} {noun}" + ("es" if noun.endswith("s") else "s") * (count != 1)


def escape_controls(text: str) -> str:
    """Return the text with its control characters spelled out."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
