"""What the model said to a few records of an evaluation set, with their pictures."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.display.html import Html, tag

_MOST_TEXT = 1500  # characters of a prompt or an answer
_PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1+")
# Kinds that hold pixels and nothing else.
_PICTURE = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and what the model said to it."""

    where: str
    prompt: str
    answer: str
    prediction: str
    images: tuple[str, ...]  # data URIs

    @property
    def right(self) -> bool:
        return self.prediction.strip() == self.answer.strip()


@dataclass(frozen=True)
class Examples:
    """examples.json, or why it cannot be shown."""

    title: str = ""
    shown: tuple[Example, ...] = ()
    problem: str | None = None


def read_examples(path: Path) -> Examples | None:
    """None where there are none."""
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        shown = tuple(
            Example(
                str(item["where"]),
                str(item["prompt"]),
                str(item["answer"]),
                str(item["prediction"]),
                tuple(map(str, item.get("images", ()))),
            )
            for item in raw["examples"]
        )
        return Examples(f"{raw['name']}, after {int(raw['step']):,} steps", shown)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Examples(problem=f"{path.name} cannot be read: {type(error).__name__}: {error}")


def example_section(examples: Examples) -> Iterator[Html]:
    """A card for each, right or wrong."""
    yield tag("h2", "Examples", id="examples")
    if examples.problem is not None:
        yield tag("p", examples.problem, class_="alarm")
        return
    right = sum(example.right for example in examples.shown)
    yield tag("p", f"{examples.title}: {right} of {len(examples.shown)} right", class_="quiet")
    yield tag("div", *map(_card, examples.shown), class_="examples")


def _card(example: Example) -> Html:
    name, verdict = ("right", "\u2713 right") if example.right else ("wrong", "\u2717 wrong")
    images = [
        tag("img", src=uri, alt="") if _PICTURE.fullmatch(uri) else tag("span", "[no picture]")
        for uri in example.images
    ]
    return tag(
        "article",
        tag("p", tag("b", verdict), " ", tag("span", example.where, class_="quiet")),
        *([tag("div", *images, class_="pictures")] if images else []),
        tag("p", _short(example.prompt), class_="said"),
        tag("dl", *_said("answer", example.answer), *_said("model", example.prediction)),
        class_=f"card {name}",
    )


def _said(who: str, text: str) -> tuple[Html, Html]:
    return tag("dt", who, class_="quiet"), tag("dd", _short(text), class_="said")


def _short(text: str) -> str:
    """Runs of an image's placeholders as one, a long text without its middle."""
    text = _PADS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


EXAMPLE_CSS = """
.examples {
  display: grid; gap: 1.25rem; align-items: start; margin-top: .9rem;
  grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr));
}
.examples .card { margin: 0; }
.examples .right { border-left: 5px solid var(--c2); }
.examples .wrong { border-left: 5px dashed var(--alarm); }
.right b { color: var(--c2); }
.wrong b { color: var(--alarm); }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0; }
.pictures img { max-height: 11rem; width: auto; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
dl { display: grid; grid-template-columns: 4rem minmax(0, 1fr); margin: .6rem 0 0; }
dt { line-height: 1.75; }
dd { margin: 0; }
"""
