"""Answers of the model to a few records of an evaluation set, with their pictures."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.errors import DataError
from megatron_vlm.report.example_lines import Example, Examples
from megatron_vlm.report.html import Html, tag

_MAX_TEXT = 1500  # characters of a prompt or an answer
_PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1+")
# These formats hold pixels and nothing else.
_PICTURE = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


def example_section(path: Path) -> Iterator[Html]:
    """Yield a card for each example, right or wrong; nothing if the run has no examples."""
    if not os.path.lexists(path):
        return
    yield tag("h2", "Examples", id="examples")
    try:
        examples = Examples.read(path)
    except DataError as error:
        problem = f"{path.name} cannot be read: {error}"
        yield tag("p", problem, class_="alarm")
        return
    right = sum(example.is_right for example in examples.examples)
    title = (
        f"{examples.name}, after {examples.step:,} steps: {right} of {len(examples.examples)} right"
    )
    yield tag("p", title, class_="quiet")
    yield tag("div", *map(_card, examples.examples), class_="examples")


def _card(example: Example) -> Html:
    name, verdict = ("right", "\u2713 right") if example.is_right else ("wrong", "\u2717 wrong")
    images = [picture(uri) for uri in example.images]
    return tag(
        "article",
        tag("p", tag("b", verdict), " ", tag("span", example.where, class_="quiet")),
        *([tag("div", *images, class_="pictures")] if images else []),
        tag("p", shorten_text(example.prompt), class_="said"),
        tag(
            "dl", *_quote_html("answer", example.answer), *_quote_html("model", example.prediction)
        ),
        class_=f"card {name}",
    )


def _quote_html(who: str, text: str) -> tuple[Html, Html]:
    return tag("dt", who, class_="quiet"), tag("dd", shorten_text(text), class_="said")


def picture(uri: str) -> Html:
    """Return the picture of a data URI; nothing else is loaded."""
    return tag("img", src=uri, alt="") if _PICTURE.fullmatch(uri) else tag("span", "[no picture]")


def shorten_text(text: str) -> str:
    """Shorten a text: repeated placeholders of an image become one, and a long text loses its
    middle."""
    text = _PADS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
