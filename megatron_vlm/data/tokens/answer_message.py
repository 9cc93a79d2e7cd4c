"""The text of an answer as a message: marks that are special tokens cannot stay in its text, which
would spell them, so that thoughts and calls are taken out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.family.chat_format import ChatFormat


def with_thoughts(turn: ChatMessage, chat_format: ChatFormat) -> ChatMessage:
    """Take the thoughts at the beginning of an answer out of its text."""
    thoughts, first = chat_format.thoughts, next(iter(turn.parts), None)
    is_marked = turn.role == "assistant" and thoughts.end in chat_format.shown
    if not is_marked or turn.reasoning or not isinstance(first, str):
        return turn
    block, end, rest = first.partition(thoughts.end)
    if not end or not block.startswith(thoughts.opened):
        return turn
    reasoning = block.removeprefix(thoughts.opened).strip("\n")
    return replace(turn, reasoning=reasoning, parts=(rest, *turn.parts[1:]))


def message_of(
    text: str, chat_format: ChatFormat, tools: Sequence[Mapping[str, Any]]
) -> ChatMessage:
    """Return an answer with its first thoughts and, if all can be read, its calls. Later thoughts
    are cut out, as the template would do."""
    message, calls = ChatMessage("assistant", (text,)), chat_format.calls
    if calls.start not in chat_format.shown:
        return message
    message = with_thoughts(message, chat_format)
    said, cut_out = str(message.parts[0]), chat_format.thoughts.cut_out
    found = calls.read(said, tools)
    if not found:
        return replace(message, parts=(cut_out(said),))
    functions = ({"name": name, "arguments": values} for name, values in found)
    named = tuple({"type": "function", "function": each} for each in functions)
    return replace(message, parts=(cut_out(said.partition(calls.start)[0]),), tool_calls=named)
