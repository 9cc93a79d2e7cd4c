"""Sections of a report: its facts, texts, tables and charts.

A command or a run builds them once; html.py draws them as a page, terminal.py in the terminal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_vlm.data.tokens.boxes_as_text import Outline

Tone = Literal["", "quiet", "alarm", "good"]
# A picture is its pixels [height, width, 3], or a data URI. Another text stands in its place.
PictureSource = np.ndarray | str
# These formats hold pixels and nothing else.
_PICTURE_URI = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


def is_picture_uri(text: str) -> bool:
    """Return whether a text is the data URI of a picture; nothing else is loaded by a page."""
    return _PICTURE_URI.fullmatch(text) is not None


class Section:
    """Section of a report."""


@dataclass(frozen=True)
class Report:
    """Report with a title, also for a browser's `tab`. A terminal ends with the summary."""

    tab: str
    title: str
    lead: Sequence[str]  # quiet lines under the title
    summary: Sequence[Section]
    sections: Sequence[Section]


@dataclass(frozen=True)
class Heading(Section):
    """Title of the sections that follow. Those that have a name are linked from the top."""

    text: str
    name: str = ""


@dataclass(frozen=True)
class Note(Section):
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Command(Section):
    """Words to copy, after their title."""

    title: str
    text: str


@dataclass(frozen=True)
class Listing(Section):
    """Sentences under a title. Only the first ones are shown."""

    title: str
    sentences: Sequence[str]
    tone: Tone = ""


@dataclass(frozen=True)
class Tiles(Section):
    """The figures that a reader looks for first: (figure, its meaning)."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table(Section):
    """Table with names on the left and figures on the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Styled:
    """Text of another kind: special tokens, placeholders of a picture, a weight of the loss."""

    text: str
    kind: Literal["special", "view", "weight"]


@dataclass(frozen=True)
class Marked:
    """Text that is marked: trained tokens, or the one that is meant."""

    pieces: Sequence[str | Styled]


@dataclass(frozen=True)
class Said(Section):
    """Text of a record or a model, with its line breaks."""

    pieces: Sequence[str | Styled | Marked]
    tone: Tone = ""


@dataclass(frozen=True)
class Code(Section):
    """Text of a file."""

    text: str


@dataclass(frozen=True)
class Pictures(Section):
    """Pictures next to each other."""

    pictures: Sequence[PictureSource]


@dataclass(frozen=True)
class OutlinedPictures(Section):
    """An image, or frames that the model sees as one. `cell`: the share of a side per token."""

    name: str
    caption: str
    pictures: Sequence[np.ndarray]
    cell: tuple[float, float]
    outlines: Sequence[Outline] = ()


@dataclass(frozen=True)
class Labelled(Section):
    """Sections next to their label, which may be a score from the worst, 0, to the best, 1."""

    label: str
    sections: Sequence[Section]
    score: float | None = None


@dataclass(frozen=True)
class Card(Section):
    """Sections in a frame, with a title and where they come from."""

    title: str
    where: str
    sections: Sequence[Section]
    tone: Tone = ""


@dataclass(frozen=True)
class SideBySide(Section):
    """Sections that a page shows next to each other. The first of several cards is the most
    important one. A terminal shows this one alone."""

    sections: Sequence[Section]


@dataclass(frozen=True)
class CardPages(Section):
    """Cards to filter by kind and to search. A page shows `at_once` at a time, and a terminal the
    first `in_terminal`. Wide cards stand below each other."""

    cards: Sequence[Card]
    kinds: Sequence[str]  # one for each card; empty if all cards are of one kind
    at_once: int
    in_terminal: int = 1
    is_wide: bool = False


@dataclass(frozen=True)
class Fold(Section):
    """Sections that a page shows when its reader opens them."""

    title: str
    remark: str
    sections: Sequence[Section]
    is_open: bool = False


@dataclass(frozen=True)
class Bars(Section):
    """Histogram of integers."""

    name: str
    values: np.ndarray


@dataclass(frozen=True)
class Scatter(Section):
    """Points over two axes. With a bound, y is logarithmic and the bound is a line; without one,
    both axes are alike and a line shows where they are equal."""

    title: str
    words: str
    x_label: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str]
    bound: float | None = None


@dataclass(frozen=True)
class TimeBox:
    """Forward or backward of a micro-batch in a row of a timeline. Times are seconds."""

    row: int
    is_forward: bool
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline(Section):
    """Boxes of the stages of a pipeline over the time of a step."""

    words: str
    rows: int
    boxes: Sequence[TimeBox]

    @property
    def end(self) -> float:
        return max(box.end for box in self.boxes)
