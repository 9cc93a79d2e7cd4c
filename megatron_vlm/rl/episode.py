"""Episode: a prompt, the answers, and the environment's messages between them.

Shapes: S tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.user_code.environment import EnvStep


@dataclass
class Episode:
    """Episode of a prompt, which has several. The prompt and the environment's messages are rows
    without labels, in `shown`; episodes share their pictures. `ids` and `log_probs` hold all tokens
    of the episode in order, shown or drawn."""

    number: int  # number among all episodes of the run so far
    group: int  # number of its prompt in the step
    place: int  # place among the episodes of this prompt
    where: str
    record: Mapping[str, Any]
    shown: list[Row] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)  # None: the token was not drawn
    versions: list[int] = field(default_factory=list)  # version of the weights for each answer
    answers: list[str] = field(default_factory=list)
    reward: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    teacher_kl: float | None = None  # mean over its tokens
    cut: bool = False  # the last answer, or the episode, has reached its maximum length

    def add_observation(self, row: Row, end_id: int) -> None:
        """Add the prompt, or messages of the environment. An answer that was cut at its maximum
        length is closed with the end token, which was not drawn."""
        if self.cut:
            self.ids.append(end_id)
            self.log_probs.append(None)
        self.shown.append(row)
        self.ids += row.ids_S.tolist()
        self.log_probs += [None] * len(row.ids_S)

    def add_completion(self, answer: Completion, text: str) -> None:
        """Add an answer and its text."""
        self.ids += answer.ids
        self.log_probs += answer.log_probs
        self.versions.append(answer.version)
        self.answers.append(text)
        self.cut = answer.ended == "length"

    def take(self, step: EnvStep) -> None:
        """Add the environment's response to the answer."""
        self.reward += step.reward
        for name, value in step.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    @property
    def trained(self) -> int:
        """Number of tokens that were drawn."""
        return sum(each is not None for each in self.log_probs)

    def prompt(self) -> Row:
        """Return the row that the next answer continues. For the first answer, episodes that share
        their opening row return the same object."""
        if not self.answers:
            return self.shown[0]
        ids_S = torch.tensor(self.ids)
        return Row(ids_S, torch.full_like(ids_S, IGNORE), **pictures_of(self.shown))


@dataclass
class Group:
    """Prompt and its episodes."""

    question: str  # text of the prompt
    episodes: list[Episode]
    source: int = 0  # place of its record's source in data.train

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @property
    def has_signal(self) -> bool:
        """True if its rewards differ, so that there is something to learn."""
        return len(set(self.rewards)) > 1


def pictures_of(shown: list[Row]) -> dict[str, Any]:
    """Return the visual fields of a Row that has the pictures and videos of these rows, in
    order."""
    visuals: dict[str, Any] = {}
    for name in VISUAL_FIELDS:
        parts = [part for row in shown if (part := getattr(row, name)) is not None]
        visuals[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)) if parts else None
    return visuals
