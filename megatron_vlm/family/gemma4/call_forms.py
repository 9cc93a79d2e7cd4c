"""Calls of tools in the text of answers of Gemma 4:
`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`. It is JSON with bare keys, and with `<|"|>` for
the quotes of strings, which have no escapes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from megatron_vlm.family.chat_format import CallMarks, FoundCall

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
