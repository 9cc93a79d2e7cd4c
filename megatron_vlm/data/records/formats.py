"""Conversion of a raw dict, in any of the common formats, into a Record. The keys tell the format,
as docs/data.md lists them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from megatron_vlm.data.records.boxes import parse_objects
from megatron_vlm.data.records.keys import Keys, misspelled_key
from megatron_vlm.data.records.messages import image_of, media_column, parse_messages
from megatron_vlm.data.records.plain import (
    PLAIN_NAMES,
    QUESTIONS,
    as_turns,
    find_plain_form,
    needed_beside,
    parse_pairs,
)
from megatron_vlm.data.records.record import (
    ChatMessage,
    Conversation,
    EncodedRecord,
    ImageChunk,
    is_list,
    parse_text,
    require_object,
    require_record,
    single_value,
    weight_of,
)
from megatron_vlm.data.records.record_media import check_lone_marks, place_media
from megatron_vlm.data.records.tool_calls import parse_tools
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile, is_too_deep

# The keys of a list of messages or pairs, which identify a format. _COMMON has those of all.
_LISTS = ("messages", "conversations", "conversation", "texts")
_COMMON: tuple[str, ...] = ("system", "system_prompt", "tools", "functions", "objects")
_COMMON += ("image", "images", "video", "videos")
# Variables of the chat template: trl's object, and the one that decides about thinking.
VARIABLE_KEYS = ("chat_template_kwargs", "enable_thinking")
_COMMON += VARIABLE_KEYS
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NAMING = frozenset({*_LISTS, *PLAIN_NAMES} - {"texts"})  # most likely, `text` is no slip of it
_NAMES = (
    "messages; conversations; prompt and completion; question and answer; instruction and output; "
    "image and text; or chunks"
)


def parse_record(
    raw: Any,
    where: str,
    ignore_keys: Collection[str] = (),
    strict: bool = False,
    lone_marks: Literal["refuse", "text"] = "refuse",
    passed: Counter[str] | None = None,
    caption_prompt: str = "",
    prompts_only: bool = False,
) -> Conversation | EncodedRecord:
    """Parse a raw dict into a Record, or raise a DataError with the problem and its place. A key
    that most likely has a meaning is an error where it is neither read nor in `ignore_keys`. Other
    keys of the record itself are counted in `passed`; `strict` makes them errors, too. With
    `prompts_only`, keys with answers are for the reward alone."""
    raw = require_record(raw, where)
    if is_too_deep(raw):
        raise UntrustedFile(where, remedy="mend the record or drop it").depth_error()
    keys = Keys(where, ignore_keys, strict, prompts_only)
    raw = keys.record(raw)
    encoded = "chunks" in raw or "model_input" in raw
    record = parse_chunks(raw, keys) if encoded else _parse_chat(raw, keys, caption_prompt)
    keys.check(record)
    if lone_marks == "refuse":
        check_lone_marks(keys.marked, record)
    if passed is not None:
        passed.update(keys.passed)
    return record


def _parse_chat(raw: Mapping[str, Any], keys: Keys, caption_prompt: str) -> Conversation:
    where = keys.where
    names = (name for name in _LISTS if name in raw and (name != "texts" or _has_pairs(raw[name])))
    if name := next(names, None):
        raw = keys.read(raw, {name, *_COMMON}, where)
        if _has_pairs(raw[name]):
            turns = parse_pairs(raw[name], name, keys)
        else:
            turns = parse_messages(raw[name], where, keys)
        if not turns:
            raise DataError("is empty", place=where, key=name)
    elif form := find_plain_form(raw, keys.prompts_only):
        keys.needed = needed_beside(form, keys.prompts_only)
        raw = keys.read(raw, {*form.known(raw, keys.prompts_only), *_COMMON}, where)
        turns = form.turns(raw, keys, caption_prompt)
    else:
        raise _unknown_format(raw, where)
    system = single_value(raw, ("system", "system_prompt"), where)
    turns = as_turns(system, "system", keys) + turns
    columns = {kind: media_column(raw, kind, keys) for kind in ("image", "video")}
    turns = place_media(turns, columns, where)
    for index, turn in enumerate(turns):
        if turn.role == "system" and index:
            raise DataError(
                ": only the first message may be a system message",
                place=f"{where}: message {index}",
                key="role",
                found="system",
            )
    objects = parse_objects(raw.get("objects"), turns, keys)
    if not keys.prompts_only:
        _check_answers(turns, where)
    variables = _variables(raw, keys)
    return Conversation(where, tuple(turns), parse_tools(raw, where), objects, variables)


def _variables(raw: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return the variables of the chat template that the record sets."""
    where = keys.where
    given = raw.get("chat_template_kwargs") or {}
    given = parse_text(given, "chat_template_kwargs", where) if isinstance(given, str) else given
    filled = require_object(given, where, "chat_template_kwargs").items()
    named = {str(name): value for name, value in filled if value is not None}
    variables = {name: value for name, value in named.items() if name not in keys.ignored}
    if taken := sorted(_OWN_VARIABLES & variables.keys()):
        raise DataError(
            "is not a variable that a record may set",
            place=where,
            key=f"chat_template_kwargs.{taken[0]}",
            remedy="leave it out; messages and tools have keys of their own",
        )
    thinks = raw.get("enable_thinking")
    if thinks is None:
        return variables
    if variables.setdefault("enable_thinking", thinks) != thinks:
        raise DataError(
            "differs from that of chat_template_kwargs",
            place=where,
            key="enable_thinking",
            found=thinks,
            remedy="give one of them",
        )
    return variables


def _check_answers(turns: Sequence[ChatMessage], where: str) -> None:
    """Refuse answers that are pictures alone: only the end of the answer would be learnt."""
    for number, turn in enumerate(turns):
        is_picture = turn.parts and not any(isinstance(part, str) for part in turn.parts)
        says_more = turn.tool_calls or turn.reasoning or turn.weight == 0
        if turn.role == "assistant" and is_picture and not says_more:
            raise DataError(
                ": the answer is a picture or a video, as in data for making pictures, and the "
                "model writes text alone",
                place=f"{where}: message {number}",
                key="content",
                remedy="leave such records out, or set weight: 0 for this message to show it "
                "without learning it",
            )


def _has_pairs(value: Any) -> bool:
    """Return whether the entries of a list have an answer each, in place of a role."""
    first = value[0] if is_list(value) and len(value) else None
    return isinstance(first, Mapping) and "assistant" in first and not {"role", "from"} & {*first}


class OnlyAsksError(DataError):
    """A record that has a question and no answer."""


def _unknown_format(raw: Mapping[str, Any], where: str) -> DataError:
    key_names = sorted(map(str, raw))
    if question := next((name for name in QUESTIONS if name in raw), ""):
        return OnlyAsksError(
            f"has a question, and none of the keys {key_names} is known to have its answer",
            place=where,
            key=question,
            remedy="name the answer completion, response or answer; a record that only asks is "
            "for megatron-vlm rl, whose reward gets all other keys",
        )
    slips = [(key, misspelled_key(key, _NAMING)) for key in key_names if key not in _NAMING]
    likely = [f"{key!r} is most likely {near!r}" for key, near in slips if near]
    return DataError(
        f": the keys {key_names} match no known format",
        place=where,
        remedy=f"give {'; '.join([_NAMES, *likely])}; or name your keys by data.columns; see "
        "docs/data.md",
    )


_MASKS = ("mask", "loss_mask", "weights")
_SOURCES = ("data", "image", "location")


def parse_chunks(raw: Mapping[str, Any], keys: Keys) -> EncodedRecord:
    """Parse a raw dict that has `chunks` or `model_input`."""
    where = keys.where
    raw = keys.read(raw, {"chunks", "model_input", *_MASKS}, where)
    chunks: Any = single_value(raw, ("chunks", "model_input"), where)
    if isinstance(chunks, Mapping):
        chunks = keys.read(chunks, {"chunks"}, f"{where}: model_input").get("chunks")
    if not is_list(chunks) or not len(chunks):
        raise DataError("must be a list with at least one chunk", place=where, key="chunks")
    parsed = tuple(_parse_chunk(c, f"{where}: chunk {i}", keys) for i, c in enumerate(chunks))
    mask = single_value(raw, _MASKS, where)
    if mask is not None:
        if not is_list(mask):
            raise DataError(
                "must be a list of weights such as 0 and 1, one for each token",
                place=where,
                key="mask",
            )
        mask = tuple(weight_of(value, f"mask[{i}]", where) for i, value in enumerate(mask))
    return EncodedRecord(where, parsed, mask)


def _parse_chunk(chunk: Any, where: str, keys: Keys) -> tuple[int, ...] | ImageChunk:
    if require_object(chunk, where).get("tokens") is not None:
        keys.read(chunk, {"type", "tokens"}, where)
        tokens = chunk["tokens"]
        if not is_list(tokens) or any(type(t) is not int or t < 0 for t in tokens):
            raise DataError("must be a list of token ids", place=where, key="tokens")
        return tuple(tokens)
    # The bytes of a picture tell its format.
    chunk = keys.read(chunk, {"type", *_SOURCES, "format", "expected_tokens"}, where)
    source = single_value(chunk, _SOURCES, where)
    if source is None:
        raise DataError(
            f"has neither tokens nor an image; its keys are {sorted(chunk)}", place=where
        )
    if isinstance(source, str) and chunk.get("type") == "image" and "data" in chunk:
        source = f"data:image;base64,{source}"  # JSON carries bytes as base64
    expected = chunk.get("expected_tokens")
    if expected is not None and (type(expected) is not int or expected < 1):
        raise DataError(
            place=where, key="expected_tokens", found=expected, allowed="a count, at least 1"
        )
    return ImageChunk(image_of(source, where, keys), expected)
