"""A task of two turns for a model that thinks. The model sees a small grey picture and chooses a
crop. Then it sees the crop in colour and large, and names the colour of the shape. The reward is
its only feedback.

    python scripts/rl/crop.py OUT RECORDS

This writes OUT/crop.jsonl and OUT/eval.jsonl, whose environment is `Crop`, and OUT/words.jsonl.
From the latter a model learns the form of such a conversation, but neither where to look nor the
right colour.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image

from megatron_vlm import EnvStep
from megatron_vlm.commands.demo.coloured_shapes import SHAPES, Scene, Shape, draw

SIDE = 64  # pixels along a side of a half of the picture; a crop shows a half
SIZE = 28
ASKED = "Which side is the shape on? You will see it."
AGAIN = "What colour is it?"
SIDES = ("left", "right")
# A colour whose name the model never tries is never learnt, and a tiny model soon tries few.
NAMES = ("red", "green", "blue", "yellow")
LOOK = 0.2  # share of the reward for choosing the side with the shape
HELD_OUT = 200  # records of eval.jsonl


class Crop:
    """An episode of the task."""

    def reset(self, record: Mapping[str, Any]) -> None:
        """Begin with the record's own messages."""
        self.record, self.looked = record, False

    def step(self, answer: str) -> EnvStep:
        """Return the chosen crop, and after the second answer the reward for the colour. What
        counts is what follows the thoughts."""
        choice = answer.rpartition("</think>")[2].strip()
        if self.looked:
            return EnvStep(1 - LOOK if choice == self.record["colour"] else 0.0)
        if choice not in SIDES:
            return EnvStep(0.0)
        self.looked = True
        is_right = choice == self.record["side"]
        picture = crop(self.record["picture"], choice)
        return EnvStep(LOOK * is_right, [shown(picture, AGAIN)], {"found": float(is_right)})


def shown(picture: PIL.Image.Image | str, text: str) -> dict[str, Any]:
    """Return a message with a picture."""
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def crop(picture: str, side: str) -> PIL.Image.Image:
    """Return a half of a picture."""
    left = SIDES.index(side) * SIDE
    with PIL.Image.open(picture) as image:
        return image.crop((left, 0, left + SIDE, SIDE))


def make(out: Path, records: int, seed: int = 0) -> None:
    """Write the sets and their pictures."""
    rng = random.Random(seed)
    folder = out / "pictures"
    folder.mkdir(parents=True)
    asked, words = [], []
    for number in range(HELD_OUT + records):
        record, turns = _record(folder, number, rng)
        asked.append(record)
        words += turns
    _write(out / "eval.jsonl", asked[:HELD_OUT])
    _write(out / "crop.jsonl", asked[HELD_OUT:])
    _write(out / "words.jsonl", words[2 * HELD_OUT :])


def _record(
    folder: Path, number: int, rng: random.Random
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the record of a picture, and a conversation for each turn to be learnt."""
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
    # The answers are random there, because only the words are to be learnt.
    look, guess = rng.choice(SIDES), rng.choice(NAMES)
    half = folder / f"{number}-{look}.png"
    crop(str(large), look).save(half)
    second = shown(f"pictures/{half.name}", AGAIN)
    # The template takes the thoughts out of the first answer once the second question follows.
    seen = {"role": "assistant", "content": look, "weight": 0}
    words = [[first, _thought(look)], [first, seen, second, _thought(guess)]]
    return {"messages": [first], **facts}, [{"messages": each} for each in words]


def _thought(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, "reasoning_content": f"{text}?"}


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
