"""An inspection in the terminal. Without colours, trained text is in {+ +}, as in a word diff. A
loss weight other than 1 precedes it, such as (x0.5).

All text of records is `Text`, never rich's markup, with control characters spelled out.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vlm.commands.inspect import inspect_tables
from megatron_vlm.commands.inspect.statistics import Inspection
from megatron_vlm.data.tokens.sample_views import ShownSample, ShownTurn, TextPiece
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.terminal import plain_table

TRAINED = "black on green"
VIEW = "cyan"
SPECIAL = "dim"
WEIGHT = "bold magenta"
_MAX_ERRORS = 5


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print the samples, then the figures of the whole set."""
    coloured = console.color_system is not None and not console.no_color
    for shown in inspection.shown:
        _print_sample(shown, inspection.num_samples, console, coloured)
    if inspection.shown:
        trained = TextPiece("trained", trained=True)
        legend = turn_text(ShownTurn("", (trained,)), coloured)
        console.print(legend, Text(": the loss is taken on these tokens", "dim"), "\n", sep="")
    console.print(_table(*inspect_tables.source_table(inspection)))
    console.print(_table(*inspect_tables.size_table(inspection)))
    _print_faults(inspection, console)
    console.print(_table(*inspect_tables.inspect_batch_table(inspection)))


def turn_text(turn: ShownTurn, coloured: bool) -> Text:
    """Return the pieces of a turn, with the trained ones marked."""
    text = Text(overflow="fold")
    for (trained, mark), pieces in groupby(turn.pieces, lambda piece: (piece.trained, piece.mark)):
        brackets = ("{+", "+}") if trained and not coloured else ("", "")
        if mark:
            text.append(f"({mark})", WEIGHT)
        text.append(brackets[0])
        for piece in pieces:
            # A trained newline would be invisible otherwise.
            shown = piece.text.replace("\n", "\u21b5\n") if trained else piece.text
            text.append(escape_controls(shown), TRAINED if trained else _style(piece))
        text.append(brackets[1])
    return text


def _style(piece: TextPiece) -> str:
    if piece.view is not None:
        return VIEW
    return SPECIAL if piece.special else ""


def _print_sample(shown: ShownSample, total: int, console: Console, coloured: bool) -> None:
    title = (f"sample {shown.number} of {total:,}", "bold")
    where = f"  {escape_controls(shown.where)}\n"
    console.print(Text.assemble(title, where, (shown.figures, SPECIAL)))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for turn in shown.turns:
        grid.add_row(Text(escape_controls(turn.role)), turn_text(turn, coloured))
    console.print(grid)
    for view in (piece.view for turn in shown.turns for piece in turn.pieces if piece.view):
        if view.outlines:
            outlines = "; ".join(outline.text for outline in view.outlines)
            console.print(Text(escape_controls(f"{view.label}: {outlines}"), VIEW))
    if shown.problem is not None:
        console.print(Text(escape_controls(shown.problem), "red"))
    console.print()


def _print_faults(inspection: Inspection, console: Console) -> None:
    if inspection.dropped:
        console.print(_table(*inspect_tables.dropped_table(inspection)))
    if inspection.passed:
        console.print(Text(escape_controls(inspection.passed)), "\n", sep="", soft_wrap=True)
    if not inspection.errors:
        return
    console.print(Text(f"wrong records: {len(inspection.errors):,}", "bold"))
    for message in inspection.errors[:_MAX_ERRORS]:
        console.print(Text(f"  {escape_controls(message)}"), soft_wrap=True)
    if (more := len(inspection.errors) - _MAX_ERRORS) > 0:
        console.print(Text(f"  and {more:,} more", SPECIAL))
    console.print()


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str) -> Table:
    table = plain_table(caption=caption or None, caption_justify="left")
    for name in header:
        first = name == header[0]
        table.add_column(name, overflow="fold", justify="left" if first else "right")
    for row in rows:
        table.add_row(*(Text(escape_controls(cell)) for cell in row))
    return table
