"""What tests of learning from samples are judged by: files of a user's, loaded by their path."""

from collections.abc import Mapping
from typing import Any

import PIL.Image

from megatron_vlm.rl.environment import EnvStep


def letters(record: Mapping[str, Any], answer: str) -> dict[str, float]:
    """A random model's answers differ in it."""
    return {"reward": len(answer) % 5, "long": len(answer) > 5}


def equal(record: Mapping[str, Any], answer: str) -> float:
    """Nothing is learnt from records whose pictures are fewer than two."""
    parts = record["messages"][0]["content"]
    return len(answer) % 5 if sum(part["type"] == "image" for part in parts) > 1 else 1.0


def wrong(record: Mapping[str, Any], answer: str) -> float:
    """A mistake of a user's."""
    raise KeyError("solution")


class Looks:
    """Three turns, after two of which it shows something."""

    def reset(self, record: Mapping[str, Any]) -> None:
        self.turn = 0

    def step(self, answer: str) -> EnvStep:
        self.turn += 1
        reward = (len(answer) + self.turn) % 5
        if self.turn == 3:
            return EnvStep(reward)
        colour = (80 * self.turn, len(answer) % 200, 30)
        picture = PIL.Image.new("RGB", (40 + 20 * self.turn, 64), colour)
        said = {"type": "text", "text": f"look again {self.turn}"}
        parts = [{"type": "image", "image": picture}, said]
        return EnvStep(reward, [{"role": "user", "content": parts}], {"turns": 1})


def short(record: Mapping[str, Any], answer: str) -> float:
    """Easy to learn for a model that says anything."""
    return -float(len(answer))
