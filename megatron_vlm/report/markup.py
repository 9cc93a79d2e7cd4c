"""Elements of HTML and SVG.

`tag` escapes every string that is not itself markup, so text of a record stays text.
"""

import json
from html import escape
from typing import Any

from megatron_vlm.io.printable import escape_controls

_VOID = frozenset(("meta", "img", "input", "rect", "line", "path"))


class Html(str):
    """Markup. Any other string is text."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: object) -> Html:
    """Return an element; `class_` is its class. An attribute that is None is left out."""
    inner = "".join(c if isinstance(c, Html) else escape(escape_controls(c)) for c in content)
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(escape_controls(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{rendered}/>")
    return Html(f"<{name}{rendered}>{inner}</{name}>")


def json_block(value: Any) -> Html:
    """Return data for a script of the page. Nothing in it can end the element or run."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json")
