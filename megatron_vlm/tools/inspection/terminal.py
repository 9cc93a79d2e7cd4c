"""An inspection in the terminal. Without colours, trained text stands in {+ +}, as in a word diff.

All that comes from records is `Text`, never rich's markup, with control characters spelled out.
"""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vlm.data.encode.views import Piece, ShownSample, ShownTurn
from megatron_vlm.display.html import visible
from megatron_vlm.display.tables import plain_table
from megatron_vlm.tools.inspection.collect import (
    SUMMARY,
    Batching,
    Inspection,
    SourceFigures,
    figure,
)

TRAINED = "black on green"
VIEW = "cyan"
SPECIAL = "dim"
_MOST_ERRORS = 5


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Samples first, then the figures of the whole set."""
    coloured = console.color_system is not None and not console.no_color
    for shown in inspection.shown:
        _print_sample(shown, inspection.num_samples, console, coloured)
    if inspection.shown:
        trained = Piece("trained", trained=True)
        legend = turn_text(ShownTurn("", (trained,)), coloured)
        console.print(legend, Text(": the loss is taken on these tokens", "dim"), "\n", sep="")
    console.print(_sources(inspection.sources))
    console.print(_statistics(inspection))
    _print_faults(inspection, console)
    console.print(_batching(inspection.batching))


def turn_text(turn: ShownTurn, coloured: bool) -> Text:
    """A turn's pieces, the trained ones marked."""
    text = Text(overflow="fold")
    for trained, pieces in groupby(turn.pieces, key=lambda piece: piece.trained):
        brackets = ("{+", "+}") if trained and not coloured else ("", "")
        text.append(brackets[0])
        for piece in pieces:
            # A trained newline would not be seen otherwise.
            shown = piece.text.replace("\n", "\u21b5\n") if trained else piece.text
            text.append(visible(shown), TRAINED if trained else _style(piece))
        text.append(brackets[1])
    return text


def _style(piece: Piece) -> str:
    if piece.view is not None:
        return VIEW
    return SPECIAL if piece.special else ""


def _print_sample(shown: ShownSample, total: int, console: Console, coloured: bool) -> None:
    console.print(
        Text.assemble(
            (f"sample {shown.number} of {total:,}", "bold"),
            f"  {visible(shown.where)}\n",
            (shown.figures, SPECIAL),
        )
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for turn in shown.turns:
        grid.add_row(Text(visible(turn.role)), turn_text(turn, coloured))
    console.print(grid)
    if shown.problem is not None:
        console.print(Text(visible(shown.problem), "red"))
    console.print()


def _sources(sources: tuple[SourceFigures, ...]) -> Table:
    table = _table("source", ("weight", "records", "samples", "dropped", "wrong", "per epoch"))
    for source in sources:
        counts = (source.records, source.samples, source.dropped, source.wrong, source.per_epoch)
        table.add_row(Text(visible(source.name)), f"{source.weight:g}", *map(figure, counts))
    return table


def _statistics(inspection: Inspection) -> Table:
    table = _table(f"of {inspection.num_samples:,} samples", SUMMARY)
    for column in inspection.columns:
        table.add_row(column.name, *map(figure, column.summary))
    return table


def _print_faults(inspection: Inspection, console: Console) -> None:
    if inspection.dropped:
        table = _table("dropped by rule", ("records", "the first"))
        for rule, count, where in inspection.rules:
            table.add_row(Text(rule), figure(count), Text(visible(where)))
        console.print(table)
    if not inspection.errors:
        return
    console.print(Text(f"wrong records: {len(inspection.errors):,}", "bold"))
    for message in inspection.errors[:_MOST_ERRORS]:
        console.print(Text(f"  {visible(message)}"), soft_wrap=True)
    if (more := len(inspection.errors) - _MOST_ERRORS) > 0:
        console.print(Text(f"  and {more:,} more", SPECIAL))
    console.print()


def _batching(batching: Batching) -> Table:
    table = _table(
        "rows taken", ("padding", "busiest rank", "in its worst step", "micro-batches a step")
    )
    for way in batching.ways:
        loads = (f"{way.imbalance:.3f}x", f"{way.worst:.3f}x")
        table.add_row(way.name, f"{way.padding:.1%}", *loads, figure(way.micro_batches))
    table.caption = batching.caption
    table.caption_justify = "left"
    return table


def _table(first: str, numbers: tuple[str, ...]) -> Table:
    table = plain_table()
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table
