"""Pages that need nothing else: no script, no file, no network.

`tag` escapes every string that is not itself markup, so text of a record stays text.
"""

import base64
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import PIL.Image

# Characters that could steer a terminal, turn text around or not be written at all.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_VOID = frozenset(("meta", "img", "rect", "line", "path"))
# Should anything of a record become markup after all, it can still load and run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Html(str):
    """Markup. Any other string is text."""

    __slots__ = ()


def visible(text: str) -> str:
    """The text with control characters spelled out."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def tag(name: str, /, *content: str, **attributes: object) -> Html:
    """An element; `class_` is its class."""
    inner = "".join(c if isinstance(c, Html) else escape(visible(c)) for c in content)
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(visible(str(value)))}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{inner}</{name}>")


def document(title: str, css: str, body: Iterable[Html]) -> str:
    """A whole page; `css` comes behind what all pages share."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        Html(f"<style>{_CSS}{css}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def data_uri(pixels: np.ndarray) -> str:
    """A picture [height, width, 3] inside the page. PNG keeps every pixel."""
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def contents(links: Iterable[tuple[str, str]]) -> Html:
    """Links to parts of the page: (id, text)."""
    return tag("nav", *(tag("a", text, href=f"#{name}") for name, text in links))


def tiles(items: Iterable[tuple[str, str]]) -> Html:
    """The figures a reader looks for first: (figure, what it is)."""
    cards = (tag("div", tag("b", value), tag("span", name), class_="card") for value, name in items)
    return tag("div", *cards, class_="tiles")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Html:
    """Names to the left, figures to the right; it scrolls by itself where it is too wide."""
    lines = [tag("tr", *(tag("th", name) for name in header))]
    lines += [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    named = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *named, *lines), class_="card scroll")


# One column, light or dark as the reader's system is, two widths.
_CSS = """
:root {
  color-scheme: light dark;
  --paper: #f7f6f3; --card: #ffffff; --ink: #24272c; --quiet: #6a6f78; --line: #e4e1da;
  --bar: #6b8cae; --alarm: #b3402a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171b; --card: #1d2026; --ink: #dfe2e7; --quiet: #969ca6; --line: #31353d;
    --bar: #7b9cc0; --alarm: #ee8a72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 66rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1 { font-size: 1.6rem; font-weight: 650; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.75rem 0 .9rem; }
p { margin: .3rem 0; }
nav { margin: .6rem 0 1.5rem; }
nav a { color: inherit; margin-right: 1rem; text-underline-offset: .2em; }
.quiet, figcaption, caption, th { color: var(--quiet); }
.quiet, nav { font-size: .875rem; overflow-wrap: anywhere; }
.alarm { color: var(--alarm); overflow-wrap: anywhere; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 1rem 1.25rem; margin: 0 0 1.25rem;
}
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); }
.tiles .card { margin: 0; padding: .7rem 1rem; }
.tiles b { display: block; font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
.charts {
  display: grid; gap: 1.25rem; margin: 0 0 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr));
}
.charts .card { margin: 0; padding: .8rem 1rem .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { caption-side: bottom; text-align: left; font-size: .85rem; padding-top: .6rem; }
th { font-weight: 500; font-size: .85rem; vertical-align: bottom; }
th, td {
  text-align: right; padding: .35rem 0 .35rem 1rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums;
}
th:first-child, td:first-child {
  text-align: left; padding-left: 0; min-width: 7rem; overflow-wrap: anywhere;
}
tr:last-child td { border-bottom: 0; }
img { max-width: 100%; height: auto; border-radius: 3px; }
@media (max-width: 640px) {
  body { padding: 1.5rem .9rem 3rem; }
  .card { padding: .8rem .9rem; }
  table { font-size: .82rem; }
  th { font-size: .78rem; }
  th, td { padding-left: .45rem; }
  th:first-child, td:first-child { min-width: 4.5rem; }
}
"""
