"""Episode: a prompt, the answers to it, and what an environment says between them.

Shapes: S tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.rl.environment import EnvStep
from megatron_vlm.training.completions import Completion


@dataclass
class Episode:
    """One of several to a prompt. What was shown are rows without labels, whose pictures episodes
    share; tokens lie beside each other as the model has seen or drawn them."""

    number: int  # among all of the run so far
    group: int  # the number of its prompt in the step
    place: int  # among the episodes to this prompt
    where: str
    record: Mapping[str, Any]
    shown: list[Row] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)  # None: the token was not drawn
    versions: list[int] = field(default_factory=list)  # of the weights, for each answer
    answers: list[str] = field(default_factory=list)
    reward: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    cut: bool = False  # an answer, or the episode, was ended by its length

    def hear(self, row: Row, end_id: int) -> None:
        """The prompt, or what the environment says. An answer that its length ended is closed by
        the token that should have, which was not drawn."""
        if self.cut:
            self.ids.append(end_id)
            self.log_probs.append(None)
        self.shown.append(row)
        self.ids += row.ids_S.tolist()
        self.log_probs += [None] * len(row.ids_S)

    def say(self, answer: Completion, text: str) -> None:
        """An answer, and the text of it."""
        self.ids += answer.ids
        self.log_probs += answer.log_probs
        self.versions.append(answer.version)
        self.answers.append(text)
        self.cut = answer.ended == "length"

    def take(self, step: EnvStep) -> None:
        """What the environment makes of the answer."""
        self.reward += step.reward
        for name, value in step.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    @property
    def trained(self) -> int:
        """The tokens that were drawn."""
        return sum(each is not None for each in self.log_probs)

    def prompt(self) -> Row:
        """What the next answer continues. Episodes that begin alike have the same object."""
        if not self.answers:
            return self.shown[0]
        ids_S = torch.tensor(self.ids)
        return Row(ids_S, torch.full_like(ids_S, IGNORE), **pictures_of(self.shown))


@dataclass
class Group:
    """A prompt and its episodes."""

    question: str  # its text
    episodes: list[Episode]

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @property
    def has_signal(self) -> bool:
        """Whether some of its answers are better than others."""
        return len(set(self.rewards)) > 1


def pictures_of(shown: list[Row]) -> dict[str, Any]:
    """The fields of a Row that has the pictures and videos of these, one after the other."""
    found: dict[str, Any] = {}
    for name in VISUAL_FIELDS:
        parts = [part for row in shown if (part := getattr(row, name)) is not None]
        found[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)) if parts else None
    return found
