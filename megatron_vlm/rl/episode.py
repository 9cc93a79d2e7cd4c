"""Episode: a prompt, the answers, and the environment's messages between them.

Shapes: S tokens, L decoder layers with experts, K experts of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import Row, join_parts, parts_of, prompt_row
from megatron_vlm.user_code.environment import EnvStep, Opening


@dataclass
class Segment:
    """A stretch of an episode in which each turn continues what the model has seen: a row of the
    train batch. `ids` and `log_probs` hold all of its tokens in order, shown or drawn."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)  # None: the token was not drawn
    pictures: list[Row] = field(default_factory=list)  # rows whose pictures it has, in order
    prompt_length: int = 0  # number of the tokens that it began with
    teacher_ids: torch.Tensor | None = None  # what a teacher sees in place of these
    # Experts of the tokens up to the last that was drawn; -1 where none are known. None: an engine
    # returns no experts.
    routing_SLK: Tensor | None = None

    def add_shown(self, ids: Sequence[int]) -> None:
        """Add tokens that were not drawn."""
        self.ids += ids
        self.log_probs += [None] * len(ids)

    def add_routing(self, routing_SLK: Tensor) -> None:
        """Add the experts of all tokens so far, from the request that drew the last ones. Tokens
        keep the experts of the request that first read them."""
        if (known_SLK := self.routing_SLK) is not None:
            start = len(known_SLK)
            first_SLK = torch.where(known_SLK < 0, routing_SLK[:start], known_SLK)
            routing_SLK = torch.cat([first_SLK, routing_SLK[start:]])
        self.routing_SLK = routing_SLK

    def shown_routing(self, length: int | None = None) -> Tensor | None:
        """Return the experts of all tokens, -1 for those that were shown since the last answer.
        `length`: number of tokens of a request that continues the segment."""
        known_SLK = self.routing_SLK
        if known_SLK is None:
            return None
        more = (length or len(self.ids)) - len(known_SLK)
        return torch.cat([known_SLK, known_SLK.new_full((more, *known_SLK.shape[1:]), -1)])

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
    opening: Opening = None  # the environment's first messages; None: the record's messages
    said: list[ChatMessage] = field(default_factory=list)  # answers and messages after the opening
    shown: list[Row] = field(default_factory=list)
    first: int = 0  # place in `shown` of the conversation's opening
    segments: list[Segment] = field(default_factory=list)
    # Versions of the weights of its tokens: see Completion.
    versions: list[tuple[int, int]] = field(default_factory=list)
    accepted: list[tuple[int, ...]] = field(default_factory=list)  # see Completion.accepted
    answers: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # number of the segment of each answer, from 1
    reward: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    teacher_view: Opening = None  # what teacher.view returns; None: the record has no view
    teacher_opening: Row | None = None  # the same as a row, which a teacher sees for shown[0]
    teacher_kl: float | None = None  # mean over its tokens
    cut: bool = False  # the last answer, or the episode, has reached its maximum length

    def begin(self, opening: Row) -> None:
        """Show the prompt."""
        self.shown.append(opening)
        teacher = self.teacher_opening
        self.begin_segment(opening.ids_S.tolist(), None if teacher is None else teacher.ids_S)

    def begin_again(self, messages: Opening, opening: Row) -> None:
        """Show a new conversation, in place of all that was before. A teacher sees the same."""
        self.opening, self.said, self.first = messages, [], len(self.shown)
        self.teacher_opening = None
        self.begin(opening)

    def begin_segment(self, ids: Sequence[int], teacher_ids: torch.Tensor | None = None) -> None:
        """Begin a segment with all tokens that the model sees now, and all pictures so far."""
        pictures = self.shown[self.first :]
        self.segments.append(Segment([], [], pictures, len(ids), teacher_ids))
        self.segments[-1].add_shown(ids)

    def add_observation(self, row: Row, end_id: int) -> None:
        """Add messages of the environment to the segment. An answer that was cut at its maximum
        length is closed with the end token, which was not drawn."""
        self.segments[-1].add_shown([end_id] * self.cut + row.ids_S.tolist())
        self.segments[-1].pictures.append(row)
        self.shown.append(row)

    def segment_of(self, prompt: Row) -> Segment | None:
        """Return the longest segment that a prompt continues: all of its tokens and pictures begin
        the prompt."""
        ids, pictures = prompt.ids_S.tolist(), _pixels_of([prompt])
        for each in sorted(self.segments, key=lambda segment: -len(segment.ids)):
            length, own = len(each.ids), _pixels_of(each.pictures)
            is_begun = length < len(ids) and ids[:length] == each.ids and len(own) <= len(pictures)
            # Episodes and requests that show the same picture have the same object.
            if is_begun and all(a is b for a, b in zip(own, pictures, strict=False)):
                return each
        return None

    def add_request(self, prompt: Row, answer: Completion, text: str) -> None:
        """Add an answer to an agent's request, whose prompt continues a segment or begins one."""
        if (segment := self.segment_of(prompt)) is None:
            segment = Segment(prompt_length=len(prompt.ids_S))
            self.segments.append(segment)
        new = prompt.ids_S.tolist()[len(segment.ids) :]
        shown = parts_of(prompt, "pixel_values_PC")[len(_pixels_of(segment.pictures)) :]
        # What was said after an answer, or a first request that is not the record's prompt.
        if self.answers or new != [number for row in self.shown for number in row.ids_S.tolist()]:
            visuals = join_parts({"pixel_values_PC": shown})
            self.shown.append(replace(prompt_row(new), **visuals))
        segment.add_shown(new)
        segment.pictures = [prompt]
        self.add_completion(answer, text, segment)

    def add_completion(self, answer: Completion, text: str, segment: Segment | None = None) -> None:
        """Add an answer and its text, to the last segment if none is given."""
        segment = segment or self.segments[-1]
        segment.ids += answer.ids
        segment.log_probs += answer.log_probs
        if answer.routing_SLK is not None:
            segment.add_routing(answer.routing_SLK)
        self.versions += answer.versions
        self.accepted.append(answer.accepted)
        self.answers.append(text)
        self.rows.append(1 + [each is segment for each in self.segments].index(True))
        self.cut = answer.ended == "length"

    def take(self, step: EnvStep) -> None:
        """Add the environment's response to the answer."""
        self.reward += step.reward
        if step.tools is not None:
            self.record = {**self.record, "tools": step.tools}
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
        last = self.segments[-1]
        return replace(prompt_row(last.ids, last.pictures), routing_SLK=last.shown_routing())


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


def _pixels_of(shown: Sequence[Row]) -> list[Tensor]:
    """Return the patches of each picture of these rows."""
    return [pixels for row in shown for pixels, _ in parts_of(row, "pixel_values_PC")]
