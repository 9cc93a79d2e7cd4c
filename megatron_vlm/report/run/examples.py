"""Answers of the model to a few records of an evaluation set, with their pictures."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.errors import DataError
from megatron_vlm.report import sections
from megatron_vlm.report.example_lines import Example, Examples

_MAX_TEXT = 1500  # characters of a prompt or an answer
_PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1+")


def example_section(path: Path) -> Iterator[sections.Section]:
    """Yield a card for each example, right or wrong; nothing if the run has no examples."""
    if not os.path.lexists(path):
        return
    yield sections.Heading("Examples", "Examples")
    try:
        examples = Examples.read(path)
    except DataError as error:
        yield sections.Note(f"{path.name} cannot be read: {error}", "alarm")
        return
    right = sum(example.is_right for example in examples.examples)
    title = (
        f"{examples.name}, after {examples.step:,} steps: {right} of {len(examples.examples)} right"
    )
    yield sections.Note(title, "quiet")
    yield sections.SideBySide([*map(_card, examples.examples)])


def _card(example: Example) -> sections.Card:
    quotes = {"answer": example.answer, "model": example.prediction}
    parts = [
        sections.Pictures([*map(known_picture, example.images)]),
        sections.Said([shorten_text(example.prompt)]),
        *(
            sections.Labelled(who, [sections.Said([shorten_text(text)])])
            for who, text in quotes.items()
        ),
    ]
    if example.is_right:
        return sections.Card("\u2713 right", example.where, parts, "good")
    return sections.Card("\u2717 wrong", example.where, parts, "alarm")


def known_picture(uri: str) -> str:
    """Return the data URI of a picture as it is, and a text in place of anything else."""
    return uri if sections.is_picture_uri(uri) else "[no picture]"


def shorten_text(text: str) -> str:
    """Shorten a text: repeated placeholders of an image become one, and a long text loses its
    middle."""
    text = _PADS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
