"""The chat format of a model family: what a chat is in the text of the template, and in its tokens.

Shapes: U tokens before placeholders are expanded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class VisionMarks:
    """The special tokens around and in place of images."""

    start: str
    end: str
    image: str  # stands for one visual token of an image
    video: str
    # Text of a picture in the place of the mark `image` of the template, with one such mark.
    picture: str


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of reasoning in the text of an answer."""

    opened: str  # the beginning of an answer with reasoning: <think> and a newline
    end: str  # </think>
    empty: str  # a block without reasoning, with what comes before the answer

    @property
    def start(self) -> str:
        """The mark alone."""
        return self.opened.split("\n")[0]

    def is_open(self, opening: str) -> bool:
        """Return whether a prompt that ends in this text leaves its block open."""
        return self.start in opening and self.end not in opening

    def contrary(self, opening: str) -> str:
        """Return how an answer begins that is contrary to the text that opens answers."""
        return self.opened if self.end in opening else self.empty

    def text_of(self, thoughts: str, answer: str) -> str:
        """Return an answer with reasoning, as text."""
        return f"{self.opened}{thoughts}\n{self.end}{self.empty.partition(self.end)[2]}{answer}"

    def split(self, text: str) -> tuple[str, str] | None:
        """Return the reasoning in the text of an answer and what follows it, or None without it, as
        Qwen3.5's template takes it out of the text; that of Qwen3.8 does not."""
        if self.end not in text:
            return None
        thoughts = text.split(self.end)[0].rstrip("\n").split(self.start)[-1].lstrip("\n")
        return thoughts, text.split(self.end)[-1].lstrip("\n")

    def drop_open(self, text: str) -> str:
        """Return the text of an answer without a block that it has not closed."""
        before, end, after = text.rpartition(self.end)
        return before + end + self.cut_out(after)

    def cut_out(self, text: str) -> str:
        """Return a text without its blocks and lone closing marks, as Gemma's template shows it."""
        token = self.start.partition(">")[0] + ">"  # <|channel> of <|channel>thought
        return "".join(part.partition(token)[0] for part in text.split(self.end))


FoundCall = tuple[str, dict[str, Any]]  # name and arguments


@dataclass(frozen=True)
class CallMarks:
    """Calls of tools in the text of an answer."""

    start: str  # <tool_call>
    # Calls in a text with these tools; None if there is none, or one that cannot be read.
    read: Callable[[str, Sequence[Mapping[str, Any]]], list[FoundCall] | None]
    # Rules in Lark for a `call` of one of these tools, as a template's text writes it, by the
    # symbol of each mark. None: no grammar has exactly these calls.
    rules: Callable[[Sequence[Mapping[str, Any]], str, Callable[[str], str]], str] | None = None


class ChatTurn(Protocol):
    """A message of a record."""

    @property
    def role(self) -> str: ...

    @property
    def parts(self) -> Sequence[object]: ...


def is_blank(turn: ChatTurn) -> bool:
    """Return whether a message shows nothing but white space."""
    return not any(not isinstance(part, str) or part.strip() for part in turn.parts)


@dataclass(frozen=True)
class RenderedText:
    """A chat as the template has rendered it."""

    text: str
    ids_U: np.ndarray
    starts_U: np.ndarray  # the character at which each token starts
    id_of: Mapping[str, int]  # ids of the format's tokens
    where: str


@dataclass(frozen=True)
class MessageSpan:
    """A message of the rendered text: tokens [body, end) after its role, with its closing token."""

    role: str
    body: int
    end: int
    turns: Sequence[int]  # turns of the record that it shows
    is_after_result: bool = False  # an answer in the turn of the result before it


@dataclass(frozen=True)
class Openings:
    """Text that a template adds where an answer is to follow."""

    after_question: str  # with the role
    after_result: str  # the same after the result of a tool


@dataclass(frozen=True)
class ChatFormat:
    """A chat format. Records have the roles system, user, assistant and tool."""

    opens: str  # token that opens a turn; its role and a newline follow
    ends: tuple[str, ...]  # tokens that end an answer; the first, one that calls no tool
    marks: VisionMarks
    thoughts: ThoughtMarks
    calls: CallMarks
    # Messages of a rendered chat, or an error if the template is of another format. A message need
    # not be a turn: some formats have answers and results of tools in one.
    find_messages: Callable[[RenderedText, Sequence[ChatTurn]], list[MessageSpan]]
    y_first: bool = False  # boxes and points in texts are [y1, x1, y2, x2] and [y, x]
    # What a template's refusal contains, and the remedy for it.
    remedies: tuple[tuple[str, str], ...] = ()
    # Special tokens that belong to the text of an answer: marks of reasoning and of calls.
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()  # other special tokens that find_messages looks for
    # Changes the text of a chat that ends with an answer, so that this begins as prompts do, or
    # with these thoughts, if the template does not show them. None: the template itself does.
    begin_answer: Callable[[str, Openings, str], str] | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that a tokenizer of this format has."""
        marks = self.marks
        named = (self.opens, *self.ends, marks.image, marks.video, marks.start, marks.end)
        return (*named, *self.shown, *self.hidden)

    def remedy_of(self, refusal: str) -> str:
        """Return the remedy for what the template refuses, or ""."""
        return next((remedy for text, remedy in self.remedies if text in refusal), "")
