"""Pages that need no other file and no network.

`tag` escapes every string that is not itself markup, so text of a record stays text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import home_path

_VOID = frozenset(("meta", "img", "input", "rect", "line", "path"))
# Should any text of a record become markup after all, it still loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def save_page(path: str, page: str) -> None:
    """Write the page that a command's --html names."""
    try:
        home_path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key="--html", found=path
        ) from error


class Html(str):
    """Markup. Any other string is text."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: object) -> Html:
    """Return an element; `class_` is its class."""
    inner = "".join(c if isinstance(c, Html) else escape(escape_controls(c)) for c in content)
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(escape_controls(str(value)))}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{rendered}/>")
    return Html(f"<{name}{rendered}>{inner}</{name}>")


def json_block(value: Any) -> Html:
    """Return data for a script of the page. Nothing in it can end the element or run."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json")


def document(title: str, css: str, body: Iterable[Html], scripts: Sequence[str] = ()) -> str:
    """Return a whole page. `css` follows the styles that all pages share. The browser runs only
    `scripts`, whose digests the policy names."""
    assert not any(re.search(r"</script|<!--|\r", script, re.IGNORECASE) for script in scripts)
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"{_POLICY}; script-src {allowed}" if scripts else _POLICY
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        Html(f"<style>{Path(__file__).with_name('page.css').read_text()}{css}</style>"),
    )
    last = (tag("script", Html(script)) for script in scripts)
    return f"<!doctype html>\n{tag('html', head, tag('body', *body, *last), lang='en')}\n"


def contents(links: Iterable[tuple[str, str]]) -> Html:
    """Return links to parts of the page; an item is (id, text)."""
    return tag("nav", *(tag("a", text, href=f"#{name}") for name, text in links))


def tiles(items: Iterable[tuple[str, str]]) -> Html:
    """Return the figures that a reader looks for first; an item is (figure, its meaning)."""
    cards = (tag("div", tag("b", value), tag("span", name), class_="card") for value, name in items)
    return tag("div", *cards, class_="tiles")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Html:
    """Return a table with names on the left and figures on the right. A table that is too wide
    scrolls by itself."""
    lines = [tag("tr", *(tag("th", name) for name in header))]
    lines += [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    named = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *named, *lines), class_="card scroll")
