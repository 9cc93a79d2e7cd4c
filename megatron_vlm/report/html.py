"""A report as a page that needs no other file and no network."""

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Literal

from megatron_vlm.data.tokens.boxes_as_text import Outline
from megatron_vlm.io.printable import escape_controls, show_count
from megatron_vlm.report import sections
from megatron_vlm.report.charts import (
    CURVE_COLOURS,
    ChartControls,
    Charts,
    chart_controls,
    chart_css,
    chart_figure,
    chart_scripts,
)
from megatron_vlm.report.markup import Html, tag
from megatron_vlm.report.picture_uri import data_uri
from megatron_vlm.report.sections import Marked, PictureSource, Report, Section, Styled
from megatron_vlm.report.svg import bars_svg, scatter_svg, timeline_svg

# Should any text of a record become markup after all, it still loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MAX_SENTENCES = 1000
_MAX_OUTLINES = 200  # outlines on a picture


def render_page(report: Report) -> str:
    """Return the whole page. It has the scripts and styles that its charts need."""
    css, scripts = "", []
    if any(isinstance(part, Charts) for part in report.sections):
        css, scripts = chart_css(), [*chart_scripts()]
    if any(isinstance(part, sections.Command | sections.Timeline) for part in report.sections):
        scripts.append(script_of("copy"))
    if any(isinstance(part, sections.CardPages) for part in report.sections):
        scripts.append(script_of("paging"))
    return document(report.tab, css, page_body(report), scripts)


def script_of(name: Literal["copy", "paging"]) -> str:
    """Return copy.js, for words to copy and pipelines to point at, or paging.js, for many cards."""
    return Path(__file__).with_name(f"{name}.js").read_text()


def document(
    title: str, css: str, body: Iterable[Html], scripts: Sequence[str] = (), is_served: bool = False
) -> str:
    """Return a whole page, whose styles begin with those of all pages. Browsers run only `scripts`,
    whose digests the policy names. A page that a server gives `is_served` more by that server."""
    assert not any(re.search(r"</script|<!--|\r", script, re.IGNORECASE) for script in scripts)
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"{_POLICY}; script-src {allowed}" if scripts else _POLICY
    policy += "; connect-src 'self'" * is_served
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


def page_body(report: Report) -> Iterator[Html]:
    """Yield the elements of a page in their order."""
    yield tag("h1", report.title)
    yield from (tag("p", line, class_="quiet") for line in report.lead)
    names = [part.name for part in report.sections if isinstance(part, sections.Heading)]
    links = [tag("a", name, href=f"#{_anchor(name)}") for name in names if name]
    if links:
        yield tag("nav", *links)
    yield from map(_draw, report.summary)
    needs_help = True
    for part in report.sections:
        if needs_help and isinstance(part, Charts):
            yield from _chart_help()
            needs_help = False
        yield _draw(part)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _chart_help() -> Iterator[Html]:
    off = "The curves are drawn by JavaScript, which is off. Nothing else here needs it."
    yield tag("noscript", tag("p", off, class_="alarm"))
    zoom = "Drag over a chart to zoom in, double-click to zoom out."
    yield tag("p", zoom, class_="quiet note")


def _draw(part: Section) -> Html:
    """Return the element of a section."""
    match part:
        case sections.Heading(text, name):
            return tag("h2", text, id=_anchor(name) or None)
        case sections.Note(text, tone):
            return tag("p", text, class_=f"note {tone}")
        case sections.Said(pieces, tone):
            return tag("p", *map(_piece, pieces), class_=f"said {tone}")
        case sections.Command(title, text):
            words = tag("p", title, tag("code", text))
            copy = tag("button", "copy", title="copy the words", hidden="")
            return tag("div", words, copy, class_="copied note")
        case sections.Code(text):
            return tag("pre", text)
        case sections.Tiles(items):
            cards = (tag("div", tag("b", v), tag("span", name), class_="card") for v, name in items)
            columns = f"--columns: {tile_columns(len(items))}"
            return tag("div", *cards, class_="tiles", style=columns)
        case sections.Table():
            return _table(part)
        case sections.Listing():
            return _listing(part)
        case _:
            return _draw_group(part)


def tile_columns(count: int) -> int:
    """Return the columns of tiles on a wide page that leave the fewest places empty."""
    few = (3,) if count <= 6 else ()
    return min((5, 4, *few), key=lambda columns: -count % columns)


def _draw_group(part: Section) -> Html:
    """Return the element of a section that holds others."""
    match part:
        case sections.SideBySide(parts):
            return tag("div", *map(_draw, parts), class_="beside")
        case sections.Card(title, where, parts, tone):
            head = [tag("b", title), " "] if title else []
            first = tag("p", *head, tag("span", where, class_="quiet"))
            return tag("article", first, *map(_draw, parts), class_=f"card {tone}")
        case sections.Labelled(label, parts, score):
            style = None if score is None else f"--share: {100 * score:.0f}%"
            name = tag("b", label, class_="score" if style else None, style=style)
            return tag("div", name, tag("div", *map(_draw, parts)), class_="labelled")
        case sections.Fold(title, remark, parts, is_open):
            summary = tag("summary", tag("b", title), " ", tag("span", remark, class_="quiet"))
            return tag("details", summary, *map(_draw, parts), open="" if is_open else None)
        case sections.CardPages():
            return _card_pages(part)
        case Charts(charts, span):
            figures = (chart_figure(chart, span) for chart in charts)
            return tag("div", *figures, class_="beside")
        case _:
            return _draw_picture(part)


def _card_pages(part: sections.CardPages) -> Html:
    """Return the cards, of which paging.js shows some."""
    kinds: Sequence[str | None] = part.kinds or [None] * len(part.cards)
    pairs = zip(part.cards, kinds, strict=True)
    cards = (tag("div", _draw(card), data_kind=kind) for card, kind in pairs)
    shown = tag("div", *cards, class_="cards" if part.is_wide else "cards beside")
    return tag("div", shown, class_="paged", data_size=part.at_once)


def _draw_picture(part: Section) -> Html:
    """Return the element of a section that is a picture, or its legend."""
    match part:
        case sections.Pictures(pictures):
            shown = map(_picture, pictures)
            return tag("div", *shown, class_="pictures") if pictures else Html()
        case sections.OutlinedPictures():
            return _outlined(part) if part.pictures else Html()
        case sections.Bars(name):
            return tag("figure", tag("span", name), bars_svg(part), class_="card")
        case sections.Scatter(title):
            return tag("figure", tag("b", title), scatter_svg(part), class_="card")
        case sections.Timeline():
            return _timeline(part)
        case ChartControls():
            return chart_controls(part)
        case _:
            raise TypeError(type(part).__name__)


def _table(table: sections.Table) -> Html:
    """Return a table that scrolls by itself if it is too wide."""
    lines = [tag("tr", *(tag("th", name) for name in table.header))]
    lines += [tag("tr", *(tag("td", cell) for cell in row)) for row in table.rows]
    caption = [tag("caption", table.caption)] if table.caption else []
    return tag("div", tag("table", *caption, *lines), class_="card scroll")


def _listing(listing: sections.Listing) -> Html:
    count, shown = len(listing.sentences), listing.sentences[:_MAX_SENTENCES]
    title = listing.title + f", the first {len(shown)}" * (count > len(shown))
    items = (tag("li", sentence) for sentence in shown)
    return tag("div", tag("p", title), tag("ol", *items, class_=listing.tone), class_="card")


def _piece(piece: str | Styled | Marked) -> Html:
    if isinstance(piece, Marked):
        return tag("mark", *(_marked(each) for each in piece.pieces))
    if isinstance(piece, Styled):
        return tag("span", piece.text, class_=piece.kind)
    return _escaped(piece)


def _marked(piece: str | Styled) -> Html:
    """Return a piece whose newlines, invisible otherwise, have a sign that is not copied."""
    if isinstance(piece, Styled):
        return _piece(piece)
    newline = tag("span", class_="newline") + "\n"
    return Html(newline.join(map(_escaped, piece.split("\n"))))


def _escaped(text: str) -> Html:
    return Html(escape(escape_controls(text)))


def _picture(source: PictureSource) -> Html:
    if not isinstance(source, str):
        height, width = source.shape[:2]
        return tag("img", src=data_uri(source), width=width, height=height, alt="")
    if sections.is_picture_uri(source):
        return tag("img", src=source, alt="")
    return tag("span", source)


def _outlined(part: sections.OutlinedPictures) -> Html:
    """Return the pictures; a cell of their grid is what one token sees."""
    drawn = part.outlines[:_MAX_OUTLINES]
    overlay = [tag("i", *map(_outline, itertools.count(), drawn))] if drawn else []
    cell = " ".join(f"{100 * share:.4f}%" for share in part.cell)
    pictures = map(_picture, part.pictures)
    frames = (tag("span", picture, *overlay, style=f"--cell:{cell}") for picture in pictures)
    counted = _count_outlines(part.outlines)
    caption = f"{part.caption} \u00b7 {counted}" if counted else part.caption
    return tag("figure", tag("div", *frames), tag("figcaption", caption), class_="outlined")


def _count_outlines(outlines: Sequence[Outline]) -> str:
    """Return the numbers of boxes and points in words; nothing if there are none."""
    points = sum(len(each.numbers) == 2 for each in outlines)
    counts = {"box": len(outlines) - points, "point": points}
    words = [show_count(count, kind) for kind, count in counts.items() if count]
    if len(outlines) > _MAX_OUTLINES:
        words.append(f"the first {_MAX_OUTLINES} drawn")
    return ", ".join(words)


def _outline(place: int, outline: Outline) -> Html:
    """Return a frame around a box or a ring around a point, with its label where there is room."""
    x1, y1, x2, y2 = (outline.numbers * 2)[:4]  # both corners of a point are the same
    sides = {"left": x1, "top": y1, "width": x2 - x1, "height": y2 - y1}
    style = ";".join(f"{name}:{value / 10:.2f}%" for name, value in sides.items())
    kind = "point" if len(outline.numbers) == 2 else "box"
    turned = " right" if x1 + x2 > 1000 else ""
    label = [tag("b", outline.label)] if outline.label else []
    names = f"{kind} c{place % CURVE_COLOURS}{turned}"
    return tag("u", *label, class_=names, style=style, title=outline.text)


def _timeline(timeline: sections.Timeline) -> Html:
    kinds = ("forward", "backward", "waiting")
    keys = (tag("span", tag("i", class_=kind[0]), kind) for kind in kinds)
    legend = tag("div", *keys, class_="legend quiet")
    caption = tag("figcaption", timeline.words)
    told = tag("p", class_="quiet told", aria_live="polite")
    return tag("figure", legend, timeline_svg(timeline), told, caption, class_="card scroll")
