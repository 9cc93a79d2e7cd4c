"""A task whose teacher is the model itself with a better view. The student sees a small grey
picture and names the colour of the shape there. The teacher sees the half with the shape, large and
in colour, and knows colours there from the start.

    python scripts/rl/privileged.py OUT RECORDS HELD_OUT

This writes OUT/train.jsonl and OUT/eval.jsonl, whose view is `closer`, and OUT/words.jsonl, from
which a model learns to name the colours of large pictures.
"""

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crop import SIDE, SIDES, SIZE, crop, shown

from megatron_vlm.commands.demo.coloured_shapes import SHAPES, Scene, Shape, draw

ASKED = "What colour is the shape?"
NAMES = ("black", "red", "yellow")  # grey shades of these are far apart


def closer(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what the teacher sees in place of the record's prompt."""
    return [shown(crop(record["picture"], record["side"]), ASKED)]


def make(out: Path, records: int, held_out: int, seed: int = 0) -> None:
    """Write the sets and their pictures."""
    rng, folder = random.Random(seed), out / "pictures"
    folder.mkdir(parents=True)
    asked: list[dict[str, Any]] = []
    words: list[dict[str, Any]] = []
    for number in range(records + held_out):
        side, colour = rng.choice(SIDES), rng.choice(NAMES)
        left, top = (rng.randint(0, SIDE - SIZE) for _ in range(2))
        left += SIDES.index(side) * SIDE
        image = draw(Scene(2 * SIDE, SIDE, (Shape(rng.choice(SHAPES), colour, left, top, SIZE),)))
        large, half, grey = (folder / f"{number}-{kind}.png" for kind in ("large", "half", "grey"))
        image.save(large)
        crop(str(large), side).save(half)
        image.convert("L").convert("RGB").resize((SIDE, SIDE // 2)).save(grey)
        grey_prompt, half_prompt = (shown(f"pictures/{path.name}", ASKED) for path in (grey, half))
        facts = {"picture": str(large), "side": side}
        answer = {"role": "assistant", "content": colour}
        asked.append({"messages": [grey_prompt, answer], **facts})
        words.append({"messages": [half_prompt, answer]})
    sets = {"train": asked[:records], "eval": asked[records:], "words": words[:records]}
    for name, lines in sets.items():
        text = "".join(json.dumps(record) + "\n" for record in lines)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
