"""Chats of Gemma 4. A turn of the model holds its answers, its calls of tools and their results, so
that messages are cut where results begin and end.

Shapes: U tokens before placeholders are expanded."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.chat_format import (
    ChatFormat,
    ChatTurn,
    MessageSpan,
    Openings,
    RenderedText,
    ThoughtMarks,
    VisionMarks,
)
from megatron_vlm.family.gemma4.call_forms import CALLS

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
    pieces = [piece for start, stop in _turns(rendered) for piece in _cut(rendered, start, stop)]
    messages: list[MessageSpan] = []
    shown = 0  # turns of the record
    caller: int | None = None  # the turn whose words follow the results
    for piece, after in pairwise([*pieces, None]):
        assert piece is not None
        if piece.role == "model":
            places = [] if caller is None or _is_blank(turns[caller]) else [caller]
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


def _is_blank(turn: ChatTurn) -> bool:
    return not any(not isinstance(part, str) or part.strip() for part in turn.parts)


def _turns(rendered: RenderedText) -> Iterator[tuple[int, int]]:
    """Yield the tokens [start, stop) of each turn, from its first to the next turn."""
    opens = np.flatnonzero(rendered.ids_U == rendered.id_of[_OPEN]).tolist()
    if not opens:
        raise ConfigError(
            f": the chat template renders no {_OPEN}; only templates of Gemma 4 are supported",
            place=rendered.where,
        )
    yield from pairwise([*opens, len(rendered.ids_U)])


def _cut(rendered: RenderedText, start: int, stop: int) -> Iterator[_Piece]:
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
