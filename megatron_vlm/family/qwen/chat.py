"""ChatML as Qwen's templates write it."""

from collections.abc import Sequence

import numpy as np

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.chat_format import (
    ChatFormat,
    ChatTurn,
    MessageSpan,
    RenderedText,
    ThoughtMarks,
    VisionMarks,
)
from megatron_vlm.family.qwen.call_forms import CALLS

_START, _END = "<|im_start|>", "<|im_end|>"


def _find_messages(rendered: RenderedText, turns: Sequence[ChatTurn]) -> list[MessageSpan]:
    """Return a message for each pair of <|im_start|> and <|im_end|>."""
    opens, closes = (
        np.flatnonzero(rendered.ids_U == rendered.id_of[token]) for token in (_START, _END)
    )
    if not len(opens) or len(opens) != len(closes) or (closes < opens).any():
        raise ConfigError(
            f": the chat template renders {len(opens)} {_START} and {len(closes)} {_END}; only "
            "ChatML templates are supported",
            place=rendered.where,
        )
    messages = []
    text, starts_U, shown = rendered.text, rendered.starts_U, 0
    for start, close in zip(opens.tolist(), closes.tolist(), strict=True):
        line = text.find("\n", starts_U[start])
        role = text[starts_U[start] + len(_START) : line]
        body = int(np.searchsorted(starts_U, line + 1))
        found = _turns_of(turns, shown, role)
        messages.append(MessageSpan(role, min(body, close), close + 1, found))
        shown = found.stop
    return messages


def _turns_of(turns: Sequence[ChatTurn], first: int, role: str) -> range:
    """Return the turns that a message with this role shows: one, or several tool messages, which
    Qwen's templates show as one of the user; none for a system prompt of the template's own."""
    roles = [turn.role for turn in turns]
    if first < len(roles) and roles[first] == "system" != role and _is_blank(turns[first]):
        first += 1
    end = first
    if role == "user" and roles[first : first + 1] == ["tool"]:
        while end < len(roles) and roles[end] == "tool":
            end += 1
    elif roles[first : first + 1] == [role]:
        end += 1
    return range(first, end)


def _is_blank(turn: ChatTurn) -> bool:
    return not any(not isinstance(part, str) or part.strip() for part in turn.parts)


CHAT = ChatFormat(
    opens=_START,
    ends=(_END,),
    # The templates themselves write what is around a picture.
    marks=VisionMarks(
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image_pad|>"
    ),
    thoughts=ThoughtMarks("<think>\n", "</think>", "<think>\n\n</think>\n\n"),
    calls=CALLS,
    find_messages=_find_messages,
    remedies=(
        ("No user query found", "give the chat a message of the user that is no answer of a tool"),
        ("System message cannot contain", "move pictures and videos into a message of the user"),
        ("System message must be at the beginning", "put the system message first"),
    ),
)
