"""Conversion of a raw dict, in any of the common formats, into a Record.

The keys tell the format: OpenAI `messages`, LLaVA and ShareGPT `conversations`, `prompt` with
`completion`, Alpaca, and lists of encoded chunks. All but the last become turns with parts.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from megatron_vlm.data.records.boxes import parse_objects
from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.messages import column, image_of, parse_messages, video_of
from megatron_vlm.data.records.placeholders import check_lone_marks, place_media
from megatron_vlm.data.records.record import ChatMessage, Conversation, EncodedRecord, ImageChunk
from megatron_vlm.data.records.record_values import (
    dicts,
    is_list,
    kind_of,
    single_value,
    text_of,
    weight_of,
)
from megatron_vlm.data.records.unknown_keys import misspelled_key
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile, is_too_deep

# The first keys identify a format. The others are its own; _COMMON has those of all formats.
_FORMATS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): (),
    ("conversations",): (),
    ("prompt", "completion"): (),
    ("instruction", "output"): ("input", "history"),
}
_NAMING = frozenset(name for names in _FORMATS for name in names)
_COMMON = ("system", "tools", "image", "images", "video", "videos", "objects")
_NAMES = (
    "messages; conversations; prompt and completion; instruction and output; chunks; or a "
    "pair of an image and a text"
)


def parse_record(
    raw: Any,
    where: str,
    ignore_keys: Collection[str] = (),
    strict: bool = False,
    lone_marks: Literal["refuse", "text"] = "refuse",
    passed: Counter[str] | None = None,
) -> Conversation | EncodedRecord:
    """Parse a raw dict into a Record, or raise a DataError with the problem and its place. A key
    that has a meaning in some format, or most likely has one, is an error where it is neither read
    nor in `ignore_keys`. Other keys of the record itself are counted in `passed`; `strict` makes
    them errors, too. `lone_marks`: see the configuration."""
    if not isinstance(raw, Mapping):
        raise DataError(f": a record must be a JSON object, not {kind_of(raw)}", place=where)
    if is_too_deep(raw):
        raise UntrustedFile(where, remedy="mend the record or drop it").depth_error()
    keys = Keys(where, ignore_keys, strict)
    raw = keys.record(raw)
    encoded = "chunks" in raw or "model_input" in raw
    record = parse_chunks(raw, keys) if encoded else _parse_chat(raw, keys)
    keys.check(record)
    if lone_marks == "refuse":
        check_lone_marks(keys.marked, record)
    if passed is not None:
        passed.update(keys.passed)
    return record


def _parse_chat(raw: Mapping[str, Any], keys: Keys) -> Conversation:
    where = keys.where
    names = next((names for names in _FORMATS if all(name in raw for name in names)), None)
    if names is None:
        key_names = sorted(map(str, raw))
        slips = [(key, misspelled_key(key, _NAMING)) for key in key_names if key not in _NAMING]
        likely = [f"{key!r} is most likely {near!r}" for key, near in slips if near]
        raise DataError(
            f": the keys {key_names} match no known format",
            place=where,
            remedy=f"give {'; '.join([_NAMES, *likely])}; see docs/data.md",
        )
    raw = keys.read(raw, {*names, *_FORMATS[names], *_COMMON}, where)
    turns = _as_turns(raw.get("system"), "system", keys) + _turns_of(raw, names, keys)
    if not turns:
        raise DataError("is empty", place=where, key=names[0])
    images = [
        image_of(v, f"{where}: image {i}", keys) for i, v in enumerate(column(raw, "image", where))
    ]
    videos = [
        video_of(v, f"{where}: video {i}", keys) for i, v in enumerate(column(raw, "video", where))
    ]
    turns = place_media(turns, images, videos, where)
    for index, turn in enumerate(turns):
        if turn.role == "system" and index:
            raise DataError(
                ": only the first message may be a system message",
                place=f"{where}: message {index}",
                key="role",
                found="system",
            )
    objects = parse_objects(raw.get("objects"), turns, keys)
    tools = tuple(dicts(raw.get("tools") or (), "tools", where))
    return Conversation(where, tuple(turns), tools, objects)


def _turns_of(raw: Mapping[str, Any], names: tuple[str, ...], keys: Keys) -> list[ChatMessage]:
    where = keys.where
    if len(names) == 1:
        return parse_messages(raw[names[0]], where, keys)
    if names == ("prompt", "completion"):
        prompt = _as_turns(raw["prompt"], "user", keys)
        return prompt + _as_turns(raw["completion"], "assistant", keys)
    texts = [text_of(raw[key], key, where) for key in ("instruction", "input") if key in raw]
    turns: list[ChatMessage] = []
    keys.marked += texts
    for past_question, past_answer in _pairs(raw.get("history", ()), "history", where):
        turns += [ChatMessage("user", (past_question,)), ChatMessage("assistant", (past_answer,))]
    answer = text_of(raw["output"], "output", where)
    question = "\n".join(filter(None, texts))
    return [*turns, ChatMessage("user", (question,)), ChatMessage("assistant", (answer,))]


def _pairs(value: Any, key: str, where: str) -> Sequence[Sequence[str]]:
    pairs = value if is_list(value) else [value]
    if not all(is_list(p) and [type(text) for text in p] == [str, str] for p in pairs):
        raise DataError(
            "must be a list of pairs of strings, a question and its answer", place=where, key=key
        )
    return pairs


def _as_turns(value: Any, role: str, keys: Keys) -> list[ChatMessage]:
    """Return one turn with this role for a string, and the messages of a list."""
    if value is None or value == "":
        return [] if role == "system" else [ChatMessage(role, ())]
    if isinstance(value, str):
        return [ChatMessage(role, (value,))]
    return parse_messages(value, keys.where, keys)


# Lists of encoded chunks hold tokens that were encoded elsewhere, with images in between.

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
    if not isinstance(chunk, Mapping):
        raise DataError(f"must be an object, not {kind_of(chunk)}", place=where)
    if chunk.get("tokens") is not None:
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
