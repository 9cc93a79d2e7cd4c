"""Inputs of all trainers: a random model, photographs as JPEG files, and chats about them.

This runs in the environment of the package; the other trainers read the same files.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hf_ratio import SPECS
from PIL import Image

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec

PHOTOGRAPHS = 36
# About 30 M parameters; head, decoder and tower have the shares of Qwen3-VL 2B.
SPEC = SPECS["_2b_shares"]
# Most of these words are single tokens of the tiny model's tokenizer.
TEXT = (
    "the subject in this photo is red green blue yellow black white orange purple circle square "
    "triangle large small round thing left right above below shows a picture of"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Mix:
    """Lengths of rows: tokens of text, and numbers of pictures."""

    name: str
    rows: int  # rows of a step
    micro_batch: int
    shortest: int
    longest: int
    median: int
    pictures: tuple[int, ...]  # numbers to choose from
    spec: TinySpec = SPEC


# MIXED has text only to eight pictures, 50 to 2,000 tokens. UNIFORM has one photograph each.
MIXED = Mix("mixed", 16, 4, 30, 1500, 180, (0, 0, 0, 0, 1, 1, 1, 2, 2, 4, 8))
UNIFORM = Mix("uniform", 16, 4, 110, 110, 110, (1,))
MIXED_QWEN3_5 = replace(MIXED, name="mixed_qwen3_5", spec=SPECS["_qwen3_5"])


def photograph(generator: np.random.Generator) -> Image.Image:
    """Draw smooth shapes, edges and noise, which are about as hard for a JPEG decoder as a
    photograph."""
    width, height = (int(side) for side in generator.integers(480, 1025, 2))
    coarse = generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture).astype(np.int16)
    pixels += generator.normal(0, 9, pixels.shape).astype(np.int16)
    for _ in range(12):
        top, left = generator.integers(0, height - 40), generator.integers(0, width - 40)
        tall, wide = generator.integers(20, 200, 2)
        pixels[top : top + tall, left : left + wide] = generator.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_inputs(folder: Path, mix: Mix, steps: int) -> None:
    """Write folder/model, folder/images, folder/chats.jsonl, and folder/tagged.jsonl, which is the
    same chats as LLaMA-Factory and ms-swift read them: `<image>` in the text, and a column."""
    write_tiny(folder / "model", mix.spec)
    generator, rng = np.random.default_rng(0), random.Random(0)
    (folder / "images").mkdir()
    names = [f"images/{number}.jpg" for number in range(PHOTOGRAPHS)]
    for name in names:
        photograph(generator).save(folder / name, quality=90)
    lines, tagged = [], []
    for _ in range(mix.rows * steps):
        pictures = rng.sample(names, rng.choice(mix.pictures))
        words = mix.median * rng.lognormvariate(0, 0.9) if mix.shortest < mix.longest else 110
        count = int(min(max(words, mix.shortest), mix.longest))
        text = " ".join(rng.choice(WORDS) for _ in range(count))
        cut = len(text) * 55 // 100
        content = [{"type": "image", "image": name} for name in pictures]
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": text[:cut]}]},
            {"role": "assistant", "content": text[cut:].strip()},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
        user = {"role": "user", "content": "<image>" * len(pictures) + text[:cut]}
        paths = [str(folder / name) for name in pictures]
        tagged.append(json.dumps({"messages": [user, messages[1]], "images": paths}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))
    (folder / "tagged.jsonl").write_text("".join(tagged))
