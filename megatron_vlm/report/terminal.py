"""A report in the terminal. Without colours, marked text is in {+ +}, as in a word diff. A loss
weight other than 1 precedes it, such as (x0.5).

All text is `Text`, never rich's markup, with control characters spelled out. What only a page can
draw, such as pictures and charts, is left out.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import rich.table
from rich import box
from rich.console import Console, Group, RenderableType
from rich.text import Text

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import home_path
from megatron_vlm.report import sections
from megatron_vlm.report.html import render_page
from megatron_vlm.report.sections import Report, Section

TRAINED = "black on green"
STYLES = {"special": "dim", "view": "cyan", "weight": "bold magenta"}
TONES = {"": "", "quiet": "dim", "alarm": "red", "good": "green"}
_MAX_SENTENCES = 100
_TIMELINE_WIDTH = 72
_IDLE = "."


def plain_table(*columns: str | Text, first: int = 0, **more: Any) -> rich.table.Table:
    """Return a table with nothing but a line under its head. Columns after the `first` ones are
    numbers, on the right. `more`: arguments of rich's Table."""
    table = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)
    for place, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="left" if place < first else "right")
    return table


def print_report(report: sections.Report, console: Console) -> None:
    """Print the title, the sections, then the summary."""
    console.print(_text(report.title, "bold"))
    coloured = console.color_system is not None and not console.no_color
    lead = [sections.Note(line) for line in report.lead]
    for shown in _all([*lead, *report.sections, *report.summary], coloured):
        console.print(shown, soft_wrap=isinstance(shown, Text))


def _all(parts: Iterable[Section], coloured: bool) -> Iterator[RenderableType]:
    for part in parts:
        yield from _show(part, coloured)


def _text(text: str, style: str = "") -> Text:
    return Text(escape_controls(text), style)


def _show(part: Section, coloured: bool) -> Iterator[RenderableType]:
    """Yield what a section is in the terminal."""
    match part:
        case sections.Heading(text):
            yield _text(f"\n{text}", "bold")
        case sections.Note(text, tone):
            yield _text(text, TONES[tone])
        case sections.Said():
            yield _said(part, coloured)
        case sections.Tiles(items):
            yield _text(", ".join(f"{meaning}: {figure}" for figure, meaning in items))
        case sections.Table():
            yield _table(part)
        case sections.Listing():
            yield from _listing(part)
        case sections.OutlinedPictures():
            if part.outlines:
                outlines = "; ".join(outline.text for outline in part.outlines)
                yield _text(f"{part.name}: {outlines}", STYLES["view"])
        case sections.Timeline(words):
            yield _text(f"{words} Digits are forwards, letters backwards, dots wait.")
            yield _text(timeline_text(part))
        case _:
            yield from _show_group(part, coloured)


def _show_group(part: Section, coloured: bool) -> Iterator[RenderableType]:
    match part:
        case sections.Command(title, text):
            yield _text(title + text)
        case sections.Labelled(label, parts):
            grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(style="bold", no_wrap=True, min_width=9)  # "assistant"
            grid.add_column(overflow="fold")
            grid.add_row(_text(label), Group(*_all(parts, coloured)))
            yield grid
        case sections.Card(title, where, parts):
            yield Text.assemble((escape_controls(title), "bold"), f"  {escape_controls(where)}")
            yield from _all(parts, coloured)
            yield Text()
        case sections.CardPages():
            yield from _all(part.cards[: part.in_terminal], coloured)
        case sections.SideBySide(parts):
            has_cards = any(isinstance(each, sections.Card) for each in parts)
            yield from _all(parts[:1] if has_cards else parts, coloured)


def _table(part: sections.Table) -> rich.table.Table:
    caption = part.caption or None
    table = plain_table(*part.header, first=1, caption=caption, caption_justify="left")
    for row in part.rows:
        table.add_row(*map(_text, row))
    return table


def _listing(part: sections.Listing) -> Iterator[Text]:
    yield _text(part.title, "bold")
    yield from (_text(f"  {each}") for each in part.sentences[:_MAX_SENTENCES])
    if (more := len(part.sentences) - _MAX_SENTENCES) > 0:
        yield _text(f"  and {more:,} more", "dim")
    yield Text()


def _said(part: sections.Said, coloured: bool) -> Text:
    text = Text(overflow="fold")
    for piece in part.pieces:
        if isinstance(piece, sections.Marked):
            brackets = ("", "") if coloured else ("{+", "+}")
            text.append(brackets[0])
            for each in piece.pieces:
                # A marked newline would be invisible otherwise.
                written = each if isinstance(each, str) else each.text
                text.append(escape_controls(written.replace("\n", "\u21b5\n")), TRAINED)
            text.append(brackets[1])
        elif isinstance(piece, sections.Styled):
            written = f"({piece.text})" if piece.kind == "weight" else piece.text
            text.append(escape_controls(written), STYLES[piece.kind])
        else:
            text.append(escape_controls(piece))
    return text


def timeline_text(timeline: sections.Timeline, width: int = _TIMELINE_WIDTH) -> str:
    """Return a line for each stage: micro-batch 0, or 10, is 0 in forward and a in backward."""
    lines = [[_IDLE] * width for _ in range(timeline.rows)]
    for each in timeline.boxes:
        sign = chr(ord("0" if each.is_forward else "a") + each.number % 10)
        first, last = (round(width * time / timeline.end) for time in (each.start, each.end))
        lines[each.row][first:last] = sign * (last - first)
    return "\n".join(f"stage {row}  {''.join(line)}" for row, line in enumerate(lines))


def show_report(report: Report, html: str | None) -> None:
    """Print a report, and write it as a page if `html` is a path."""
    console = Console(highlight=False)
    print_report(report, console)
    if html is None:
        return
    try:
        home_path(html).write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key="--html", found=html
        ) from error
    console.print(escape_controls(f"wrote {html}"), markup=False, soft_wrap=True)
