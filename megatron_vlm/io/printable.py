"""Text of others, shown as text: in the terminal, in logs and on pages."""

import re

# Characters that could steer a terminal, reverse the text around them, or not be written at all.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    """The text with its control characters spelled out."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
