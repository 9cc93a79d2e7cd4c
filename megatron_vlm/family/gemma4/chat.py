"""Chats of Gemma 4. A turn of the model holds its answers, its calls of tools and their results, so
that messages are cut where results begin and end. A call in the text of an answer is
`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`. It is JSON with bare keys, and with `<|"|>` for
the quotes of strings, which have no escapes.

Shapes: U tokens before placeholders are expanded.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.chat_format import (
    CallMarks,
    ChatFormat,
    ChatTurn,
    FoundCall,
    MessageSpan,
    Openings,
    RenderedText,
    ThoughtMarks,
    VisionMarks,
    is_blank,
)

_START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_TOO_DEEP = "\n" + 64 * " "  # in indented JSON; a template calls itself for each level
# The name has a limit, so that the time for any answer is linear in its length.
_NAME, _SIGNS = re.compile(r"call:([^{}\s]{1,256})(?=\{)"), re.compile(r"([{}\[\],:])")


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[FoundCall] | None:
    """Return the calls in a text, or None if there is none, or one that cannot be read."""
    calls, at = [], text.find(_START)
    while at >= 0:
        name = _NAME.match(text, at + len(_START))
        pieces, end = _cut(text, name.end() if name else at + len(_START))
        if name is None or end < 0:
            return None
        try:
            values = json.loads("".join(_json(pieces)), parse_constant=_refuse)
            shown = json.dumps([name[1], values], ensure_ascii=False, allow_nan=False, indent=1)
            shown.encode()
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or _TOO_DEEP in shown:
            return None
        calls.append((name[1], values))
        at = text.find(_START, end)
    return calls or None


def _cut(text: str, at: int) -> tuple[list[str], int]:
    """Return the pieces of a block from this place on, of which each second is a string, and the
    end of the block, or -1."""
    pieces: list[str] = []
    while at >= 0:
        quote = text.find(_QUOTE, at)
        end = text.find(_END, at, None if quote < 0 else quote)
        if end >= 0:
            return [*pieces, text[at:end]], end + len(_END)
        first = quote + len(_QUOTE)
        close = text.find(_QUOTE, first) if quote >= 0 else -1
        pieces += [text[at:quote], text[first:close]]
        at = close + len(_QUOTE) if close >= 0 else -1
    return pieces, -1


def _json(pieces: Sequence[str]) -> Iterator[str]:
    """Yield the text of a block as JSON."""
    for number, piece in enumerate(pieces):
        if number % 2:
            yield json.dumps(piece)
            continue
        words = _SIGNS.split(piece)
        for word, sign in zip(words, [*words[1:], ""], strict=True):
            yield json.dumps(word.strip()) if sign == ":" and word.strip() else word


def _refuse(constant: str) -> NoReturn:
    """Refuse Infinity and NaN, which JSON does not have."""
    raise ValueError(constant)


CALLS = CallMarks(_START, read_calls)


_OPEN, _CLOSE, _RESULT, _RESULT_END = "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"
_MODEL = f"{_OPEN}model\n"
_THOUGHTS = ThoughtMarks("<|channel>thought\n", "<channel|>", "<|channel>thought\n<channel|>")
# Pictures and videos of a result follow it, in the text before and after marks are filled.
_MARKS = re.compile(r"(?:<\|image\|>|<\|video\|>)*")
_MEDIA = re.compile(r"(?: ?(?:\d+:\d\d )?<\|image>(?:<\|image\|>|<\|video\|>)<image\|>)*")


@dataclass(frozen=True)
class _Piece:
    """A part of a turn, tokens [body, end), of one speaker."""

    role: str  # model: words and calls; result: of a tool, in a turn of the model
    body: int
    end: int


def _find_messages(rendered: RenderedText, turns: Sequence[ChatTurn]) -> list[MessageSpan]:
    """Return the messages of a chat. What the model says between two results is one message, even
    of several turns of the record: the words beside a call, which templates show after its result,
    and the next answer."""
    pieces = [
        piece for start, stop in _turns(rendered) for piece in _cut_turn(rendered, start, stop)
    ]
    messages: list[MessageSpan] = []
    shown = 0  # turns of the record
    caller: int | None = None  # the turn whose words follow the results
    for piece, after in pairwise([*pieces, None]):
        assert piece is not None
        if piece.role == "model":
            places = [] if caller is None or is_blank(turns[caller]) else [caller]
            is_single = after is not None and after.role == "model"
            while _role(turns, shown) == "assistant" and not (is_single and places):
                places.append(shown)
                shown += 1
            if places:
                has_result = caller is not None
                messages.append(MessageSpan("assistant", piece.body, piece.end, places, has_result))
            caller = None
            continue
        role = "tool" if piece.role == "result" else piece.role
        if piece.role == "result" and caller is None:
            caller = shown - 1
        is_shown = role == _role(turns, shown)
        messages.append(MessageSpan(role, piece.body, piece.end, range(shown, shown + is_shown)))
        shown += is_shown
    return messages


def _role(turns: Sequence[ChatTurn], place: int) -> str:
    return turns[place].role if place < len(turns) else ""


def _turns(rendered: RenderedText) -> Iterator[tuple[int, int]]:
    """Yield the tokens [start, stop) of each turn, from its first to the next turn."""
    opens = np.flatnonzero(rendered.ids_U == rendered.id_of[_OPEN]).tolist()
    if not opens:
        raise ConfigError(
            f": the chat template renders no {_OPEN}; only templates of Gemma 4 are supported",
            place=rendered.where,
        )
    yield from pairwise([*opens, len(rendered.ids_U)])


def _cut_turn(rendered: RenderedText, start: int, stop: int) -> Iterator[_Piece]:
    """Yield the pieces of a turn. The token that opens a result also ends the call before it."""
    ids, close = rendered.ids_U[start:stop].tolist(), rendered.id_of[_CLOSE]
    result, result_end = rendered.id_of[_RESULT], rendered.id_of[_RESULT_END]
    first = int(rendered.starts_U[start]) + len(_OPEN)
    role = rendered.text[first : rendered.text.find("\n", first)]
    body = _after_line(rendered, first)
    opened = body  # the first token after the one that opened a result
    is_result = False  # what was before is one
    for place, token in enumerate(ids[body - start :], body):
        if token == result:
            opened = place + 1
        elif token == result_end:
            if opened > body + is_result:  # between two results, the token ends no call
                yield _Piece(role, body, opened)
            yield _Piece("result", opened, place + 1)
            body = opened = _after_media(rendered, place + 1)
            is_result = True
        elif token == close:
            yield _Piece(role, body, place + 1)
            body = opened = min(_after_line(rendered, int(rendered.starts_U[place])), stop)
            is_result = False
    if body < stop:
        yield _Piece(role, body, stop)


def _after_line(rendered: RenderedText, character: int) -> int:
    """Return the first token of the next line."""
    line = rendered.text.find("\n", character)
    return int(np.searchsorted(rendered.starts_U, line + 1)) if line >= 0 else len(rendered.ids_U)


def _after_media(rendered: RenderedText, place: int) -> int:
    """Return the first token after the pictures of a result."""
    if place == len(rendered.ids_U):
        return place
    media = _MEDIA.match(rendered.text, int(rendered.starts_U[place]))
    assert media is not None
    return int(np.searchsorted(rendered.starts_U, media.end()))


def _begin_answer(text: str, openings: Openings, thoughts: str) -> str:
    """Put what a prompt has before the last answer: an empty channel, which templates leave out of
    chats; or else the thoughts, where they leave these out."""
    place, block = text.rfind(_MODEL) + len(_MODEL), openings.after_question.removeprefix(_MODEL)
    if (result := text.rfind(_RESULT_END, place)) >= 0:
        media = _MARKS.match(text, result + len(_RESULT_END))
        assert media is not None
        place, block = media.end(), openings.after_result
    before, answer = text[:place], text[place:]
    if answer.startswith(_THOUGHTS.start):
        return text
    if thoughts:
        return before + _THOUGHTS.text_of(thoughts, answer)
    return before + (_THOUGHTS.empty if _THOUGHTS.is_open(block) else block) + answer


CHAT = ChatFormat(
    opens=_OPEN,
    ends=(_CLOSE, _RESULT),
    # The template writes the mark of a picture alone.
    marks=VisionMarks(
        "<|image>", "<image|>", "<|image|>", "<|video|>", "<|image><|image|><image|>"
    ),
    thoughts=_THOUGHTS,
    calls=CALLS,
    find_messages=_find_messages,
    shown=("<|channel>", _THOUGHTS.end, "<|tool_call>", "<tool_call|>", '<|"|>'),
    hidden=(_RESULT_END,),
    begin_answer=_begin_answer,
    y_first=True,
)
