"""Text of an answer for OpenAI's and Anthropic's clients: its thoughts, its calls of tools, and
what remains of it before a stop string."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vlm.family.chat_format import ChatFormat

_HEAD = 32  # characters of a mark that are looked for at any place near the end of a text


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as an object."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class ChatAnswer:
    """The parts of an answer."""

    content: str
    thoughts: str | None = None
    calls: tuple[ToolCall, ...] = ()


def cut_at_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[str, str | None]:
    """Return the text before the first stop string from this place on, and that string, or
    None."""
    places = [(at, stop) for stop in stops if (at := text.find(stop, begin)) >= 0]
    if not places:
        return text, None
    place, stop = min(places, key=lambda each: each[0])
    return text[:place], stop


def read_answer(
    chat_format: ChatFormat, text: str, is_thinking: bool, tools: Sequence[Mapping[str, Any]] | None
) -> ChatAnswer:
    """Divide the text of an answer. `is_thinking`: its prompt has opened a block of thoughts. With
    `tools`, blocks become calls if all of them can be read; else they stay text."""
    thoughts, marks = None, chat_format.thoughts
    if is_thinking or text.lstrip().startswith(marks.start):
        before, close, after = text.partition(marks.end)
        thoughts = before.lstrip().removeprefix(marks.start).strip("\n")
        text = after.lstrip("\n") if close else ""
    if not tools:
        return ChatAnswer(text, thoughts)
    found = chat_format.calls.read(text, tools)
    if found is None:
        return ChatAnswer(text, thoughts)
    calls = tuple(ToolCall(f"call_{uuid.uuid4().hex[:24]}", *call) for call in found)
    return ChatAnswer(text.partition(chat_format.calls.start)[0].rstrip(), thoughts, calls)


class AnswerStream:
    """An answer that grows. It gives away no half of a character, no beginning of a stop string,
    and no block that may become a call of a tool."""

    def __init__(
        self,
        chat_format: ChatFormat,
        is_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        stops: Sequence[str],
    ) -> None:
        self._chat_format, self._is_thinking = chat_format, is_thinking
        self._tools, self._stops = tools, stops
        thoughts, call = chat_format.thoughts, [chat_format.calls.start] if tools else []
        self._marks = (*stops, thoughts.start, thoughts.end, *call)
        self._longest_stop = max(map(len, stops), default=0)
        self._searched = 0  # characters before which no stop string begins
        self._thoughts = self._content = ""  # what was given

    def advance(self, text: str) -> tuple[str, str]:
        """Return what follows in the thoughts and in the content, for the text so far."""
        text, stop = cut_at_stop(text.rstrip("\ufffd"), self._stops, self._searched)
        if stop is None:
            self._searched = max(0, len(text) - self._longest_stop)
            text = text[: len(text) - _held_back(text, self._marks)]
        if self._tools:
            text = text.partition(self._chat_format.calls.start)[0].rstrip()
        answer = read_answer(self._chat_format, text, self._is_thinking, None)
        return self._give((answer.thoughts or "").rstrip("\n"), answer.content)

    def end(self, answer: ChatAnswer) -> tuple[str, str]:
        """Return what remains of the whole answer."""
        return self._give(answer.thoughts or "", answer.content)

    def _give(self, thoughts: str, content: str) -> tuple[str, str]:
        given = thoughts[len(self._thoughts) :], content[len(self._content) :]
        self._thoughts, self._content = self._thoughts + given[0], self._content + given[1]
        return given


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many of the last characters may be the beginning of a mark. With long marks it
    may be more than necessary."""
    held = 0
    for mark in marks:
        head, before = mark[:_HEAD], max(0, len(text) - len(mark) + 1)
        if len(mark) > _HEAD and (at := text.find(head, before)) >= 0:
            held = max(held, len(text) - at)
    for size in range(min(_HEAD - 1, len(text)), held, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return held
