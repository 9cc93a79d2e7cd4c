"""Episode: a prompt, the answers, and the environment's messages between them.

Shapes: S tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.user_code.environment import EnvStep, Message, Opening


@dataclass
class Segment:
    """A stretch of an episode in which each turn continues what the model has seen: a row of the
    train batch. `ids` and `log_probs` hold all of its tokens in order, shown or drawn."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)  # None: the token was not drawn
    pictures: list[Row] = field(default_factory=list)  # rows whose pictures it has, in order

    def add_shown(self, ids: Sequence[int]) -> None:
        """Add tokens that were not drawn."""
        self.ids += ids
        self.log_probs += [None] * len(ids)

    @property
    def drawn(self) -> int:
        """Number of tokens that were drawn."""
        return sum(each is not None for each in self.log_probs)


@dataclass
class Episode:
    """Episode of a prompt, which has several. The prompt and the environment's messages are rows
    without labels, in `shown`; episodes share their pictures. Where the chat template rewrites
    earlier turns, a new segment begins."""

    number: int  # number among all episodes of the run so far
    group: int  # number of its prompt in the step
    place: int  # place among the episodes of this prompt
    where: str
    record: Mapping[str, Any]
    opening: Opening = None  # the environment's first messages; None: those of the record
    replies: list[Sequence[Message]] = field(default_factory=list)  # its messages after answers
    shown: list[Row] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # version of the weights for each answer
    answers: list[str] = field(default_factory=list)
    reward: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    teacher_kl: float | None = None  # mean over its tokens
    cut: bool = False  # the last answer, or the episode, has reached its maximum length

    def begin(self, opening: Row) -> None:
        """Show the prompt."""
        self.shown.append(opening)
        self.begin_segment(opening.ids_S.tolist())

    def begin_segment(self, ids: Sequence[int]) -> None:
        """Begin a segment with all tokens that the model sees now, and all pictures so far."""
        self.segments.append(Segment(pictures=list(self.shown)))
        self.segments[-1].add_shown(ids)

    def add_observation(self, row: Row, end_id: int) -> None:
        """Add messages of the environment to the segment. An answer that was cut at its maximum
        length is closed with the end token, which was not drawn."""
        self.segments[-1].add_shown([end_id] * self.cut + row.ids_S.tolist())
        self.segments[-1].pictures.append(row)
        self.shown.append(row)

    def add_completion(self, answer: Completion, text: str) -> None:
        """Add an answer and its text."""
        self.segments[-1].ids += answer.ids
        self.segments[-1].log_probs += answer.log_probs
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
        return sum(segment.drawn for segment in self.segments)

    def prompt(self) -> Row:
        """Return the row that the next answer continues. For the first answer, episodes that share
        their opening row return the same object."""
        if not self.answers:
            return self.shown[0]
        ids_S = torch.tensor(self.segments[-1].ids)
        visuals = pictures_of(self.segments[-1].pictures)
        return Row(ids_S, torch.full_like(ids_S, IGNORE), **visuals)


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
