"""Text from outside, shown as text: in the terminal, in logs and on pages."""

import re

# These characters could steer a terminal, reverse the text around them, or fail to be written.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufffe\uffff]"
)


def escape_controls(text: str) -> str:
    """Return the text with its control characters spelled out."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
