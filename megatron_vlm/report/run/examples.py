"""Answers of the model to records of an evaluation set, with their pictures."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_vlm.errors import DataError
from megatron_vlm.report import sections
from megatron_vlm.report.example_lines import Example, Examples, ExampleTurn

_MAX_TEXT = 1500  # characters of a text
_MAX_IMAGES = 8  # pictures in one place of a text
_PICTURE_BYTES = 12 * 2**20  # bytes of all pictures of these examples
_AT_ONCE = 12
_PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1+")


def example_section(path: Path) -> Iterator[sections.Section]:
    """Yield the examples, right or wrong; nothing if the run has none."""
    if not os.path.lexists(path):
        return
    yield sections.Heading("Examples", "Examples")
    try:
        examples = Examples.read(path)
    except DataError as error:
        yield sections.Note(f"{path.name} cannot be read: {error}", "alarm")
        return
    kinds = ["right" if example.is_right else "wrong" for example in examples.examples]
    yield sections.Note(
        f"{examples.name}, after {examples.step:,} steps: {kinds.count('right')} of these "
        f"{len(kinds)} right. Wrong answers come first; the scores are those of all.",
        "quiet",
    )
    room = PictureRoom(_PICTURE_BYTES)
    cards = [_card(example, room) for example in examples.examples]
    yield sections.CardPages(cards, kinds, _AT_ONCE)


def _card(example: Example, room: "PictureRoom") -> sections.Card:
    parts = [
        *question_parts(example.turns, room),
        right_answers(example.references),
        sections.Labelled("model", [said_or_nothing(example.prediction)]),
    ]
    if example.is_right:
        return sections.Card("\u2713 right", example.where, parts, "good")
    return sections.Card("\u2717 wrong", example.where, parts, "alarm")


@dataclass
class PictureRoom:
    """Bytes that a page has left for pictures."""

    size: int

    def pictures(self, uris: Sequence[str]) -> sections.Pictures:
        """Return the pictures, with a text in place of those that find no room."""
        shown = []
        for uri in uris[:_MAX_IMAGES]:
            fits = len(uri) <= self.size
            self.size -= len(uri) * fits
            known = uri if sections.is_picture_uri(uri) else "[no picture]"
            shown.append(known if fits else "[no room for the picture]")
        if (more := len(uris) - _MAX_IMAGES) > 0:
            shown.append(f"[{more:,} more]")
        return sections.Pictures(shown)


def question_parts(turns: Sequence[ExampleTurn], room: PictureRoom) -> Iterator[sections.Section]:
    """Yield the turns of a question, each next to its role, with pictures at their places."""
    for turn in turns:
        parts: list[sections.Section] = []
        for is_picture, run in groupby(turn.parts, lambda part: bool(part.image)):
            if is_picture:
                parts.append(room.pictures([part.image for part in run]))
            else:
                parts.append(sections.Said([shorten_text("".join(part.text for part in run))]))
        yield from [sections.Labelled(turn.role, parts)] if turn.role else parts


def right_answers(references: Sequence[str]) -> sections.Section:
    """Return the right answers to a question below each other."""
    label = "answer" if len(references) == 1 else "answers"
    return sections.Labelled(label, [said_or_nothing(text) for text in references])


def said_or_nothing(text: str) -> sections.Section:
    """Return what a model said, or a remark where that is nothing."""
    if not text.strip():
        return sections.Note("(nothing)", "quiet")
    return sections.Said([shorten_text(text)])


def shorten_text(text: str) -> str:
    """Shorten a text: repeated placeholders become one, and a long text loses its middle."""
    text = _PADS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
