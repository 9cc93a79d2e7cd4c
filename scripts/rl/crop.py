"""A task of two turns: the model sees a small grey picture, asks for a crop, sees it in colour and
large, and says the colour of the shape. It is told whether that was right, and nothing else.

    python scripts/rl/crop.py OUT RECORDS

writes OUT/crop.jsonl, whose environment is `Crop`, and OUT/words.jsonl, from which a model learns
what such a conversation looks like, but neither where to look nor what it sees.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image

from megatron_vlm import SHAPES, EnvStep, Scene, Shape, draw

SIDE = 64  # of a half of the picture, which a crop shows
SIZE = 28
ASKED = "Which side is the shape on? You will see it."
AGAIN = "What colour is it?"
SIDES = ("left", "right")
# A colour whose name is never tried is never learnt, and a tiny model soon tries few.
NAMES = ("red", "green", "blue", "yellow")
LOOK = 0.2  # of the reward is for looking where the shape is


class Crop:
    """One episode."""

    def reset(self, record: Mapping[str, Any]) -> None:
        """It begins with the record's own messages."""
        self.record, self.looked = record, False

    def step(self, answer: str) -> EnvStep:
        """The crop that was asked for, then whether the colour was right."""
        if self.looked:
            return EnvStep(1 - LOOK if answer == self.record["colour"] else 0.0)
        if answer not in SIDES:
            return EnvStep(0.0)
        self.looked = True
        found = answer == self.record["side"]
        picture = crop(self.record["picture"], answer)
        return EnvStep(LOOK * found, [shown(picture, AGAIN)], {"found": float(found)})


def shown(picture: PIL.Image.Image | str, text: str) -> dict[str, Any]:
    """A message with a picture."""
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def crop(picture: str, side: str) -> PIL.Image.Image:
    """A half of a picture."""
    left = SIDES.index(side) * SIDE
    with PIL.Image.open(picture) as image:
        return image.crop((left, 0, left + SIDE, SIDE))


def make(out: Path, records: int, seed: int = 0) -> None:
    """Write both sets and their pictures."""
    rng = random.Random(seed)
    folder = out / "pictures"
    folder.mkdir(parents=True)
    found = [_record(folder, number, rng) for number in range(records)]
    _write(out / "crop.jsonl", [record for record, _ in found])
    _write(out / "words.jsonl", [words for _, words in found])


def _record(folder: Path, number: int, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    side, colour = rng.choice(SIDES), rng.choice(NAMES)
    room = SIDE - SIZE
    left, top = SIDES.index(side) * SIDE + rng.randint(0, room), rng.randint(0, room)
    shape = Shape(rng.choice(SHAPES), colour, left, top, SIZE)
    large = folder / f"{number}.png"
    image = draw(Scene(2 * SIDE, SIDE, (shape,)))
    image.save(large)
    image.convert("L").convert("RGB").resize((SIDE, SIDE // 2)).save(folder / f"{number}-grey.png")
    first = shown(f"pictures/{number}-grey.png", ASKED)
    facts = {"picture": str(large), "side": side, "colour": colour}
    # What is said there is random: it teaches the words alone.
    look, guess = rng.choice(SIDES), rng.choice(NAMES)
    half = folder / f"{number}-{look}.png"
    crop(str(large), look).save(half)
    second = shown(f"pictures/{half.name}", AGAIN)
    words = [first, _said(look), second, _said(guess)]
    return {"messages": [first], **facts}, {"messages": words}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
