"""An inspection as a report: the samples as the model sees them, then figures of the whole set."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_vlm.commands.inspect.statistics import (
    SOURCE_COUNTS,
    SUMMARY,
    Inspection,
    column_figure,
)
from megatron_vlm.data.tokens.sample_views import ShownSample, ShownTurn, TextPiece, View
from megatron_vlm.report import sections

_TITLE = "What the model sees"
_AT_ONCE = 5


def inspection_report(inspection: Inspection) -> sections.Report:
    """Return the whole report."""
    settings = ", ".join(f"{key}={value}" for key, value in inspection.settings)
    totals = {column.name: column.summary[0] for column in inspection.columns}
    figures = [
        (column_figure(inspection.num_samples), "samples"),
        (column_figure(totals["tokens"]), "tokens"),
        (f"{totals['trained tokens'] / totals['tokens']:.1%}", "trained"),
        *(
            (column_figure(totals[name]), name)
            for name in ("images", "videos")
            if totals[name] or (name == "images" and not totals["videos"])
        ),
        (column_figure(len(inspection.dropped)), "dropped"),
        (column_figure(len(inspection.errors)), "wrong"),
    ]
    parts = [*_samples(inspection), *_figures(inspection), *_left_out(inspection)]
    return sections.Report(_TITLE, _TITLE, [settings], [sections.Tiles(figures)], parts)


def _samples(inspection: Inspection) -> Iterator[sections.Section]:
    yield sections.Heading("Samples", "Samples")
    legend: list[str | sections.Styled | sections.Marked] = [
        *(sections.Marked(["trained"]), ": the loss is taken on these tokens; "),
        *(sections.Styled("x0.5", "weight"), " with this weight, if it is not 1; "),
        *(sections.Styled("<|token|>", "special"), ": special tokens. "),
        "Pictures are as the model gets them; point at one on the page to see its tokens.",
    ]
    yield sections.Said(legend, "quiet")
    cards = [_sample(shown, inspection.num_samples) for shown in inspection.shown]
    if len(cards) < inspection.num_wanted:
        text = (
            f"Their pictures are large: {len(cards)} of {inspection.num_wanted} samples are here."
        )
        yield sections.Note(text, "quiet")
    yield sections.CardPages(cards, (), _AT_ONCE, inspection.in_terminal, is_wide=True)


def _sample(shown: ShownSample, total: int) -> sections.Card:
    problem = [] if shown.problem is None else [sections.Note(shown.problem, "alarm")]
    parts = [sections.Note(shown.figures, "quiet"), *problem, *map(_turn, shown.turns)]
    return sections.Card(f"Sample {shown.number} of {total:,}", shown.where, parts)


def _turn(turn: ShownTurn) -> sections.Labelled:
    """Return role and text, and below the text the pictures whose placeholders are in it."""
    pieces: list[str | sections.Styled | sections.Marked] = []
    runs = itertools.groupby(turn.pieces, lambda piece: (piece.trained, piece.mark))
    for (trained, weight), run in runs:
        pieces += [sections.Styled(weight, "weight")] if weight else []
        pieces += [sections.Marked([*map(_piece, run)])] if trained else map(_piece, run)
    views = [_view(piece.view) for piece in turn.pieces if piece.view]
    return sections.Labelled(
        turn.role,
        [sections.Said(pieces), sections.SideBySide(views)] if views else [sections.Said(pieces)],
    )


def _piece(piece: TextPiece) -> str | sections.Styled:
    if piece.view is not None:
        return sections.Styled(piece.text, "view")
    return sections.Styled(piece.text, "special") if piece.special else piece.text


def _view(view: View) -> sections.OutlinedPictures:
    """Return an image, or the frames of a temporal patch; a cell of the grid is one token."""
    merge = math.isqrt(view.height * view.width // view.num_tokens)
    words = [view.label, view.name]
    if view.pictures:
        height, width = view.pictures[0].shape[:2]
        words.insert(1, f"{width} x {height}")
    cell = (merge / view.width, merge / view.height)
    return sections.OutlinedPictures(
        view.label, " \u00b7 ".join(words), view.pictures, cell, view.outlines
    )


def _figures(inspection: Inspection) -> Iterator[sections.Section]:
    yield sections.Heading("Sizes of samples", "Sizes")
    # A set without images has no histogram of them, nor one without videos.
    media = ("images", "videos")
    charted = [
        column
        for column in inspection.columns
        if column.name != "patches" and (column.name not in media or column.values.any())
    ]
    yield sections.SideBySide([sections.Bars(column.name, column.values) for column in charted])
    rows = [(column.name, *map(column_figure, column.summary)) for column in inspection.columns]
    yield sections.Table((f"of {inspection.num_samples:,} samples", *SUMMARY), rows)
    yield sections.Heading("Sources", "Sources")
    sources = inspection.sources
    rows = [(name, f"{weight:g}", *map(column_figure, counts)) for name, weight, counts in sources]
    yield sections.Table(("source", "weight", *SOURCE_COUNTS), rows)
    yield sections.Heading("Micro-batches", "Micro-batches")
    header = ("rows taken", "padding", "busiest rank", "in its worst step", "micro-batches a step")
    rows = []
    for way in inspection.batching.ways:
        loads = (f"{way.imbalance:.3f}x", f"{way.worst:.3f}x")
        rows.append((way.name, f"{way.padding:.1%}", *loads, column_figure(way.micro_batches)))
    yield sections.Table(header, rows, inspection.batching.caption)


def no_sample_report(dropped: Mapping[str, int], errors: Sequence[str]) -> sections.Report:
    """Return the report of a set without a sample: what each rule dropped, and wrong records."""
    figures = [
        (column_figure(0), "samples"),
        (column_figure(sum(dropped.values())), "dropped"),
        (column_figure(len(errors)), "wrong"),
    ]
    parts: list[sections.Section] = []
    if dropped:
        rows = [(rule, column_figure(count)) for rule, count in dropped.items()]
        parts.append(sections.Table(("dropped by rule", "records"), rows))
    parts += _wrong(errors)
    return sections.Report(_TITLE, _TITLE, [], [sections.Tiles(figures)], parts)


def _left_out(inspection: Inspection) -> Iterator[sections.Section]:
    """Yield what was dropped, passed over or refused; nothing if all was taken."""
    if not (inspection.dropped or inspection.errors or inspection.passed):
        return
    yield sections.Heading("Left out", "Left out")
    if inspection.dropped:
        rows = [(rule, column_figure(count), where) for rule, count, where in inspection.rules]
        yield sections.Table(("dropped by rule", "records", "the first"), rows)
    if inspection.passed:
        yield sections.Note(inspection.passed)
    yield from _wrong(inspection.errors)


def _wrong(errors: Sequence[str]) -> Iterator[sections.Section]:
    if errors:
        yield sections.Listing(f"Wrong records: {len(errors):,}", errors, "alarm")
