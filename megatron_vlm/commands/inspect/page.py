"""An inspection as one HTML page."""

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from megatron_vlm.commands.inspect import inspect_tables
from megatron_vlm.commands.inspect.statistics import Column, Inspection, column_figure
from megatron_vlm.data.media.media import data_uri
from megatron_vlm.data.tokens.boxes_as_text import Outline
from megatron_vlm.data.tokens.sample_views import ShownSample, ShownTurn, TextPiece, View
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.html import Html, contents, document, table, tag, tiles

_MAX_ERRORS = 50
_MAX_BARS = 24
_MAX_OUTLINES = 200  # outlines on a picture
_COLOURS = 6  # colours of boxes, in inspection.css


def render_inspection(inspection: Inspection) -> str:
    """Return the whole page."""
    body = (*_header(inspection), *_samples(inspection), *_figures(inspection))
    css = Path(__file__).with_name("inspection.css").read_text()
    return document("What the model sees", css, body)


def _header(inspection: Inspection) -> Iterator[Html]:
    yield tag("h1", "What the model sees")
    settings = ", ".join(f"{key}={value}" for key, value in inspection.settings)
    yield tag("p", settings, class_="quiet")
    links = [("samples", "Samples"), ("sizes", "Sizes"), ("sources", "Sources")]
    links.append(("batches", "Micro-batches"))
    if inspection.dropped or inspection.errors or inspection.passed:
        links.append(("left-out", "Left out"))
    yield contents(links)
    totals = {column.name: column.summary[0] for column in inspection.columns}
    figures = [
        (column_figure(inspection.num_samples), "samples"),
        (column_figure(totals["tokens"]), "tokens"),
        (f"{totals['trained tokens'] / totals['tokens']:.1%}", "trained"),
        (column_figure(totals["images"]), "images"),
        (column_figure(len(inspection.dropped)), "dropped"),
        (column_figure(len(inspection.errors)), "wrong"),
    ]
    yield tiles(figures)


def _samples(inspection: Inspection) -> Iterator[Html]:
    yield tag("h2", "Samples", id="samples")
    yield tag(
        "p",
        tag("span", tag("mark", "trained"), " the loss is taken on these tokens"),
        tag("span", tag("span", "x0.5", class_="weight"), " with this weight, if it is not 1"),
        tag("span", tag("span", "<|token|>", class_="special"), " special tokens"),
        tag("span", "Pictures as the model gets them; point at one to see its tokens"),
        class_="legend quiet",
    )
    for shown in inspection.shown:
        yield _sample(shown, inspection.num_samples)


def _sample(shown: ShownSample, total: int) -> Html:
    problem = [] if shown.problem is None else [tag("p", shown.problem, class_="alarm")]
    return tag(
        "article",
        tag("h3", f"Sample {shown.number} of {total:,}"),
        tag("p", f"{shown.where} \u00b7 {shown.figures}", class_="quiet"),
        *problem,
        *(_turn(turn) for turn in shown.turns),
        class_="card sample",
    )


def _turn(turn: ShownTurn) -> Html:
    """Return role and text, and below the text the pictures whose placeholders are in it."""
    spans: list[Html] = []
    runs = itertools.groupby(turn.pieces, lambda piece: (piece.trained, piece.mark))
    for (trained, mark), pieces in runs:
        parts = [_piece(piece) for piece in pieces]
        spans += [tag("span", mark, class_="weight", title="weight of the loss")] if mark else []
        spans += [tag("mark", *parts)] if trained else parts
    views = [piece.view for piece in turn.pieces if piece.view and piece.view.pictures]
    gallery = [tag("div", *map(_view, views), class_="gallery")] if views else []
    role = tag("div", turn.role, class_="role")
    text = tag("div", tag("div", *spans, class_="said"), *gallery)
    return tag("div", role, text, class_="turn")


def _piece(piece: TextPiece) -> Html:
    if piece.view is not None:
        return tag("span", piece.text, class_="chip")
    if piece.special:
        return tag("span", piece.text, class_="special")
    if not piece.trained:
        return Html(escape(escape_controls(piece.text)))
    # A trained newline would be invisible otherwise. The sign is not copied with the text.
    newline = tag("span", class_="newline") + "\n"
    return Html(newline.join(escape(escape_controls(line)) for line in piece.text.split("\n")))


def _view(view: View) -> Html:
    """Return an image, or the frames of a temporal patch; a cell of the grid is one token."""
    merge = math.isqrt(view.height * view.width // view.num_tokens)
    cell = f"--cell:{100 * merge / view.width:.4f}% {100 * merge / view.height:.4f}%"
    outlines = [tag("i", *map(_outline, itertools.count(), view.outlines[:_MAX_OUTLINES]))]
    overlay = outlines if view.outlines else []
    pictures = (tag("span", _image(pixels), *overlay, style=cell) for pixels in view.pictures)
    height, width = view.pictures[0].shape[:2]
    words = [view.label, f"{width} x {height}", view.name]
    words += [_count_outlines(view.outlines)] if view.outlines else []
    caption = tag("figcaption", " \u00b7 ".join(words))
    return tag("figure", tag("div", *pictures), caption)


def _count_outlines(outlines: Sequence[Outline]) -> str:
    points = sum(len(outline.numbers) == 2 for outline in outlines)
    kinds = ((len(outlines) - points, "box", "boxes"), (points, "point", "points"))
    words = [f"{count:,} {one if count == 1 else many}" for count, one, many in kinds if count]
    return ", ".join(
        [*words, *[f"the first {_MAX_OUTLINES} drawn"] * (len(outlines) > _MAX_OUTLINES)]
    )


def _outline(place: int, outline: Outline) -> Html:
    """Return a frame around a box, or a ring around a point, with the label on the side that has
    more room."""
    x1, y1, x2, y2 = (outline.numbers * 2)[:4]  # both corners of a point are the same
    sides = {"left": x1, "top": y1, "width": x2 - x1, "height": y2 - y1}
    style = ";".join(f"{name}:{value / 10:.2f}%" for name, value in sides.items())
    kind = "point" if len(outline.numbers) == 2 else "box"
    turned = " right" if x1 + x2 > 1000 else ""
    label = [tag("b", outline.label)] if outline.label else []
    known = {"class_": f"{kind} c{place % _COLOURS}{turned}", "style": style, "title": outline.text}
    return tag("u", *label, **known)


def _image(pixels: np.ndarray) -> Html:
    return tag("img", src=data_uri(pixels), width=pixels.shape[1], height=pixels.shape[0], alt="")


def _figures(inspection: Inspection) -> Iterator[Html]:
    yield tag("h2", "Sizes of samples", id="sizes")
    charted = [column for column in inspection.columns if column.name != "patches"]
    yield tag("div", *map(histogram, charted), class_="charts")
    yield table(*inspect_tables.size_table(inspection))
    yield tag("h2", "Sources", id="sources")
    yield table(*inspect_tables.source_table(inspection))
    yield tag("h2", "Micro-batches", id="batches")
    yield table(*inspect_tables.inspect_batch_table(inspection))
    if inspection.dropped or inspection.errors or inspection.passed:
        yield tag("h2", "Left out", id="left-out")
        yield from _faults(inspection)


def _faults(inspection: Inspection) -> Iterator[Html]:
    if inspection.dropped:
        yield table(*inspect_tables.dropped_table(inspection))
    if inspection.passed:
        yield tag("p", inspection.passed)
    if not inspection.errors:
        return
    messages = [tag("li", message) for message in inspection.errors[:_MAX_ERRORS]]
    title = f"Wrong records: {len(inspection.errors):,}"
    if len(inspection.errors) > len(messages):
        title += f", the first {len(messages)}"
    yield tag("div", tag("p", title), tag("ol", *messages, class_="alarm"), class_="card")


def histogram(column: Column) -> Html:
    """Return a histogram of integers, as inline SVG of 320 x 130."""
    start, step, counts = bins(column.values)
    width = min(312 / len(counts), 44)
    bars = []
    for place, count in enumerate(counts):
        first = start + place * step
        span = f"{first:,}" if step == 1 else f"{first:,} to {first + step - 1:,}"
        title = tag("title", f"{span}: {count:,} samples")
        tall = 84 * count / max(counts)
        box = {"x": 4 + place * width, "y": 104 - tall, "width": width - 1.5, "height": tall}
        rect = tag("rect", **{name: f"{value:.2f}" for name, value in box.items()})
        bars.append(tag("g", title, rect))
    end = 4 + len(counts) * width
    last = start + (len(counts) - 1) * step
    labels = [
        tag("text", f"{start:,}", x=4, y=120),
        tag("text", f"{last + step - 1:,}", x=f"{end:.2f}", y=120, text_anchor="end"),
        tag("text", f"tallest bar: {max(counts):,} samples", x=4, y=12),
    ]
    line = tag("line", x1=4, y1=104.5, x2=316, y2=104.5)
    svg = tag("svg", *bars, line, *labels, viewBox="0 0 320 130", role="img")
    return tag("div", tag("span", column.name), svg, class_="card")


def bins(values: np.ndarray) -> tuple[int, int, list[int]]:
    """Return the start of the first bin, the width of the bins (1, 2 or 5 times a power of ten),
    and the number of values in each bin."""
    low, high = int(values.min()), int(values.max())
    min_step = math.ceil((high - low + 1) / _MAX_BARS)
    step = next(m * 10**k for k in range(20) for m in (1, 2, 5) if m * 10**k >= min_step)
    start = low // step * step
    counts: list[int] = np.bincount((values - start) // step).tolist()
    return start, step, counts
