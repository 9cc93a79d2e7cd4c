"""Rewards and an environment for tests of reinforcement learning, as a user's files that are loaded
by their path."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import PIL.Image

from megatron_vlm.user_code.environment import EnvStep


def letters(record: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Return a reward that differs between the answers of a random model."""
    return {"reward": len(answer) % 5, "long": len(answer) > 5}


def equal(record: Mapping[str, Any], answer: str) -> float:
    """Return equal rewards for records with fewer than two pictures, from which nothing is
    learnt."""
    parts = record["messages"][0]["content"]
    return len(answer) % 5 if sum(part["type"] == "image" for part in parts) > 1 else 1.0


def solved(record: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Return a reward that needs the record's solution."""
    return {"reward": len(answer) % 5, "solved": answer.strip() == record["solution"]}


def never(record: Mapping[str, Any], answer: str) -> float:
    """Return 0 for every answer, as a reward does whose format is never met."""
    return 0.0


def wrong(record: Mapping[str, Any], answer: str) -> float:
    raise KeyError("solution")


def itself(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a view that is the prompt."""
    return [each for each in record["messages"] if each["role"] != "assistant"]


def closer(record: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return a larger picture with a hint, and None for one record in three."""
    number = record.get("solution", len(str(record)))
    if number % 3 == 2:
        return None
    image = PIL.Image.new("RGB", (96, 128), (40 * (number % 5), 120, 40))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": f"word {number}?"}]
    return [{"role": "user", "content": parts}]


def failing(record: Mapping[str, Any]) -> None:
    raise ValueError("no such crop")


def answered(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a view that ends with an answer."""
    return [*itself(record), {"role": "assistant", "content": "red"}]


def unread(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": "missing.png"}]}]


def long(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": "word " * 300}]


class Looks:
    """An environment of three turns that shows something after the first two."""

    def reset(self, record: Mapping[str, Any]) -> None:
        self.turn = 0

    def step(self, answer: str) -> EnvStep:
        self.turn += 1
        reward = (len(answer) + self.turn) % 5
        if self.turn == 3:
            return EnvStep(reward)
        colour = (80 * self.turn, len(answer) % 200, 30)
        picture = PIL.Image.new("RGB", (40 + 20 * self.turn, 64), colour)
        words = {"type": "text", "text": f"look again {self.turn}"}
        parts = [{"type": "image", "image": picture}, words]
        return EnvStep(reward, [{"role": "user", "content": parts}], {"turns": 1})


class Repeats(Looks):
    """One that says the whole conversation again, as agents do that keep it themselves."""

    def step(self, answer: str) -> EnvStep:
        told = super().step(answer)
        return EnvStep(0.0, [{"role": "assistant", "content": answer}, *told.messages])


def tool(name: str) -> Mapping[str, Any]:
    function = {"name": name, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


class Tools:
    """An environment that gives a tool at first, another before the third answer, and then a whole
    new conversation, in which the model has said something."""

    def reset(self, record: Mapping[str, Any]) -> EnvStep:
        self.turn = 0
        return EnvStep(0.5, [{"role": "user", "content": "look"}], {"begun": 1}, [tool("look")])

    def step(self, answer: str) -> EnvStep:
        self.turn += 1
        if self.turn == 1:
            return EnvStep(1.0, [{"role": "user", "content": "again"}])
        if self.turn == 2:
            parts = [{"type": "image", "image": PIL.Image.new("RGB", (64, 64))}]
            more = [tool("look"), tool("crop")]
            return EnvStep(1.0, [{"role": "user", "content": parts}], tools=more)
        if self.turn == 3:
            first = {"role": "user", "content": "in short"}
            said = {"role": "assistant", "content": "black"}
            return EnvStep(1.0, [first, said, {"role": "user", "content": "so"}], is_new=True)
        return EnvStep(1.0)


COLOURS = ("red", "green", "blue", "yellow", "black", "white")


def backwards(record: Mapping[str, Any], answer: str) -> float:
    """Return the share of seven steps around the circle of colours that lead backwards."""
    places = [COLOURS.index(word) if word in COLOURS else -9 for word in answer.split()]
    return sum((b - a) % 6 == 5 for a, b in pairwise(places[:8]) if min(a, b) >= 0) / 7


def short(record: Mapping[str, Any], answer: str) -> float:
    """Return a reward that is easy to learn for any model that writes text."""
    return -float(len(answer))
