"""Preference records: a prompt with a better and a worse answer, or an answer with a label. The raw
record is rewritten as one for each answer, whose prompt is not trained."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_vlm.data.records.formats import as_turns
from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.record import (
    MARKS,
    ChatMessage,
    Conversation,
    Image,
    Part,
    Record,
    Video,
    both_given,
    dicts,
    is_empty,
    is_list,
    require_record,
)
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile

Parse = Callable[[Mapping[str, Any], str], Record]

_LISTS = ("messages", "conversations", "conversation")
# The key of a question, and the one that has its answer in a record without preferences.
_ANSWER_OF = {
    "prompt": "completion",
    "instruction": "output",
    "query": "response",
    "question": "answer",
    "problem": "answer",
    "input": "output",
}
_CHOSEN = ("chosen", "chosen_response", "chosen_messages")
_REJECTED = ("rejected", "rejected_response", "rejected_messages")
MARGIN = "margin"  # the key, and the name of the value of a row
_LABELS = ("label", "kto_tag")
_PICTURES = ("image", "images", "video", "videos")
_FIRST_ROLES = ("system", "developer", "user", "human")
_REMEDY = "see docs/preferences.md for the formats"


def parse_pair(raw: Any, parse: Parse, ignored: Sequence[str] = ()) -> list[tuple[Record, bool]]:
    """Parse a record with a chosen and a rejected answer. `parse` parses a record of one chat.
    Return both chats, whose last turns are the answers, and of each whether it is rejected."""
    raw = require_record(raw, ignored)
    chosen, rejected = (_answer_at(raw, names) for names in (_CHOSEN, _REJECTED))
    rest = {key: raw[key] for key in raw if key not in (*_CHOSEN, *_REJECTED)}
    if rejected is None:
        raise DataError(
            "is missing: a pair has a chosen and a rejected answer", key="rejected", remedy=_REMEDY
        )
    if chosen is None:
        answers = _pair_after_chat(rest, rejected, parse)
    elif _is_chat(chosen) and _is_chat(rejected):
        answers = _pair_of_chats(rest, chosen, rejected, parse)
    elif _is_chat(chosen) or _is_chat(rejected):
        raise DataError(
            "and rejected differ in form: one has the whole chat, and one only the answer",
            key="chosen",
            remedy=_REMEDY,
        )
    else:
        answers = [
            _untrained_prompt(*_answered(rest, answer, name, parse))
            for name, answer in (("chosen", chosen), ("rejected", rejected))
        ]
    good, bad = answers
    if good.turns == bad.turns:
        raise DataError(
            "and chosen are the same answer: nothing can be learnt from the pair",
            key="rejected",
            remedy="leave the record out, or set data.max_errors=100",
        )
    return [(good, False), (bad, True)]


def split_margin(raw: Any, ignored: Sequence[str] = ()) -> tuple[dict[str, Any], float]:
    """Return a record without the margin by which its chosen answer is better, and the margin; 0 if
    it has none."""
    rest = require_record(raw, ignored)
    margin = rest.pop(MARGIN, 0.0)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise DataError(key=MARGIN, found=margin, allowed="a finite number")
    return rest, float(margin)


def parse_labelled(
    raw: Any, parse: Parse, ignored: Sequence[str] = ()
) -> list[tuple[Record, bool]]:
    """Parse a record whose answer has a label, true if it is good, or a pair of both kinds."""
    raw = require_record(raw, ignored)
    if any(name in raw for name in _REJECTED):
        return parse_pair(raw, parse)
    names = [name for name in _LABELS if name in raw]
    if not names:
        raise DataError(
            "is missing: it says whether the answer is good", key="label", remedy=_REMEDY
        )
    values = {name: raw.pop(name) for name in names}
    for name, value in values.items():
        if not isinstance(value, bool):
            raise DataError(key=name, found=value, allowed=(True, False))
    if len({*values.values()}) > 1:
        raise DataError("and kto_tag differ", key="label", remedy="give one of them")
    chat = _chat(parse(raw, ""))
    if chat.turns[-1].role != "assistant":
        raise DataError(
            ": the last message is not an answer of the assistant, and the label rates that",
            key=names[0],
        )
    answer = raw.get("completion")
    length = len(_turns_of(answer, "assistant", "")) if is_list(answer) else 1
    return [(_untrained_prompt(chat, length), not values[names[0]])]


def _answer_at(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the answer at one of these keys, a text or a list of messages, or None."""
    present = [name for name in names if name in raw]
    if not present:
        return None
    if len(present) > 1:
        raise both_given(*present[:2])
    value = raw[present[0]]
    if isinstance(value, str):
        value = _messages_in(value)
    if is_empty(value) or (isinstance(value, str) and not value.strip()):
        raise DataError(
            "is empty: nothing can be compared with it",
            key=present[0],
            remedy="leave the record out, or set data.max_errors=100",
        )
    return value if isinstance(value, str) else dicts(value, present[0])


def _messages_in(text: str) -> Any:
    """Return the messages that a text has as JSON, or the text: an answer may be JSON, too."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = UntrustedFile("").parse(text, "is no JSON")
    except DataError:
        return text
    first = value[0] if is_list(value) and value else value
    is_message = isinstance(first, Mapping) and ({"role", "content"} <= {*first} or "from" in first)
    return value if is_message else text


def _is_chat(answer: Any) -> bool:
    """Return whether messages begin with the prompt, and not with the answer."""
    if isinstance(answer, str):
        return False
    return (answer[0].get("role") or answer[0].get("from")) in _FIRST_ROLES


def _answered(
    rest: Mapping[str, Any], answer: Any, place: str, parse: Parse
) -> tuple[Conversation, int]:
    """Return the chat of the question with this answer, and the answer's number of turns."""
    length = len(_turns_of(answer, "assistant", place))
    listed = next((name for name in _LISTS if name in rest), None)
    if listed is not None:
        messages = dicts(rest[listed], listed)
        spelled = {"from": "gpt", "value": answer} if "from" in (messages or [{}])[0] else {}
        spelled = spelled or {"role": "assistant", "content": answer}
        more = [spelled] if isinstance(answer, str) else answer
        return _chat(parse({**rest, listed: [*messages, *more]}, place)), length
    question = next((name for name in _ANSWER_OF if name in rest), None)
    if question is None:
        raise DataError(
            "is missing: there are two answers, and no question",
            key="prompt",
            remedy=f"give the question as prompt, messages or conversations; {_REMEDY}",
        )
    if question != "prompt" and not isinstance(answer, str):
        [answer] = [m.get("content", m.get("value")) for m in answer] if length == 1 else [answer]
    return _chat(parse({**rest, _ANSWER_OF[question]: answer}, place)), length


def _pair_of_chats(
    rest: dict[str, Any], chosen: Any, rejected: Any, parse: Parse
) -> list[Conversation]:
    """Return the chats of a pair that both begin with the prompt, which may stand apart, too."""
    prompt = rest.pop("prompt", None)
    good, bad = (
        _chat(parse({**rest, "messages": messages}, name))
        for name, messages in (("chosen", chosen), ("rejected", rejected))
    )
    pairs = zip(good.turns, bad.turns, strict=False)
    shared = next(
        (number for number, (one, other) in enumerate(pairs) if one != other),
        min(len(good.turns), len(bad.turns)),
    )
    if prompt is not None:
        _check_prompt(prompt, good.turns[:shared])
    for name, chat in (("chosen", good), ("rejected", bad)):
        has_user = any(turn.role == "user" for turn in chat.turns[:shared])
        if not has_user or not any(turn.role == "assistant" for turn in chat.turns[shared:]):
            if good.turns == bad.turns:
                return [good, bad]  # refused as a pair of the same answers
            raise DataError(
                ": the turns that chosen and rejected share are the prompt, and there must be a "
                "question among them and an answer after them",
                key=name,
                remedy="check that both begin with the same messages",
            )
    return [_untrained_prompt(chat, len(chat.turns) - shared) for chat in (good, bad)]


def _check_prompt(prompt: Any, shared: Sequence[ChatMessage]) -> None:
    """Refuse a prompt that has more than what chosen and rejected begin with."""
    messages = prompt if isinstance(prompt, str) else dicts(prompt, "prompt")
    known = [item for turn in shared for item in _items(turn)]
    known += [_words([part]) for turn in shared for part in turn.parts]
    known += [type(item)("") for item in known if isinstance(item, Image | Video)]  # no source
    for turn in _turns_of(messages, "user", "prompt"):
        if any(item not in known for item in _items(turn)):
            raise DataError(
                "is not among the messages that chosen and rejected both begin with",
                key="prompt",
                remedy="leave it out, or let chosen and rejected have the answers alone",
            )


def _turns_of(value: Any, role: str, place: str) -> list[ChatMessage]:
    """Return the turns of a prompt or of an answer by itself."""
    keys = Keys()
    with keys.record_at(place):
        return as_turns(value, role, keys)


def _items(turn: ChatMessage) -> list[Any]:
    """Return what a message has: its words, images, videos, calls and reasoning."""
    media = [part for part in turn.parts if not isinstance(part, str)]
    items = [_words(turn.parts), *media, *turn.tool_calls, turn.reasoning]
    return [item for item in items if item]


def _words(parts: Sequence[Part]) -> str:
    """Return texts without white space and without marks, in whose places a chat has its images."""
    text = "".join(part for part in parts if isinstance(part, str))
    return "".join(MARKS.sub("", text).split())


def _pair_after_chat(rest: dict[str, Any], rejected: Any, parse: Parse) -> list[Conversation]:
    """Return the chats of ms-swift's pairs: a whole chat, and another answer or another chat."""
    pictures = {
        name.removeprefix("rejected_"): rest.pop(name)
        for name in [f"rejected_{kind}" for kind in _PICTURES]
        if name in rest
    }
    listed = next((name for name in _LISTS if name in rest), None)
    other = {**rest, **pictures}
    if listed is not None and not isinstance(rejected, str) and _is_chat(rejected):
        del other[listed]
        if pictures:
            raise DataError(
                ": the two chats have other pictures, so they have no prompt in common",
                key=f"rejected_{next(iter(pictures))}",
                remedy="give the pictures of the prompt once, as images",
            )
        return _pair_of_chats(other, dicts(rest[listed], listed), rejected, parse)
    chat = _chat(parse(rest, "chosen"))
    if chat.turns[-1].role != "assistant":
        raise DataError(
            "is missing: the record has a rejected answer, and its last message is a question",
            key="chosen",
            remedy=_REMEDY,
        )
    if listed is not None:
        messages = dicts(rest[listed], listed)
        other[listed] = messages[:-1]
    else:
        for name in ("completion", "response", "output", "answer", "solution"):
            other.pop(name, None)
    bad = _answered(other, rejected, "rejected", parse)
    return [_untrained_prompt(chat, 1), _untrained_prompt(*bad)]


def _chat(record: Record) -> Conversation:
    if not isinstance(record, Conversation):
        raise DataError(
            ": encoded chunks have no answers to compare", key="chunks", remedy="give messages"
        )
    return record


def _untrained_prompt(chat: Conversation, answers: int) -> Conversation:
    """Return the chat with a weight of 0 for all but its last turns."""
    end = len(chat.turns) - answers
    prompt = [replace(turn, weight=0.0) for turn in chat.turns[:end]]
    return replace(chat, turns=(*prompt, *chat.turns[end:]))
