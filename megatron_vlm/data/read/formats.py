"""A raw dict, in any of the formats that people use, becomes a Record.

The keys tell the format: OpenAI `messages`, LLaVA and ShareGPT `conversations`, `prompt` with
`completion`, Alpaca, and lists of encoded chunks. All but the last become turns with parts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import PIL.Image

from megatron_vlm.data.read.marks import AWAITED_IMAGE, AWAITED_VIDEO, place_media
from megatron_vlm.data.read.records import Chat, Chunks, Image, ImageChunk, Part, Turn, Video
from megatron_vlm.errors import DataError

_ROLE_NAMES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "bing"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
}
_FORMATS = (
    "messages; conversations; prompt and completion; instruction and output; chunks; or a "
    "pair of an image and a text"
)


def parse_record(raw: Any, where: str) -> Chat | Chunks:
    """The Record in a raw dict, or a DataError that says what is wrong with it, and where."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: a record is a JSON object, but this is {_kind(raw)}")
    raw = {key: value for key, value in raw.items() if value is not None}
    if "chunks" in raw or "model_input" in raw:
        return _parse_chunks(raw, where)
    turns = _turns_of(raw, where)
    if not turns:
        raise DataError(f"{where}: the chat has no messages")
    images = [_image(v, f"{where}: image {i}") for i, v in enumerate(_column(raw, "image"))]
    videos = [_video(v, None, f"{where}: video {i}") for i, v in enumerate(_column(raw, "video"))]
    turns = place_media(turns, images, videos, where)
    for index, turn in enumerate(turns):
        if turn.role == "system" and index:
            raise DataError(f"{where}: message {index} is a system message; only the first may be")
    return Chat(where, tuple(turns), tuple(_dicts(raw.get("tools", ()), f"{where}: tools")))


def _turns_of(raw: Mapping[str, Any], where: str) -> list[Turn]:
    if "messages" in raw:
        return _parse_messages(raw["messages"], where)
    if "conversations" in raw:
        system = _as_turns(raw.get("system"), "system", where)
        return system + _parse_messages(raw["conversations"], where)
    if "prompt" in raw and "completion" in raw:
        prompt = _as_turns(raw["prompt"], "user", where)
        return prompt + _as_turns(raw["completion"], "assistant", where)
    if "instruction" in raw and "output" in raw:
        given = [_text(raw, key, where) for key in ("instruction", "input") if key in raw]
        text = "\n".join(filter(None, given))
        turns = _as_turns(raw.get("system"), "system", where)
        for pair in _pairs(raw.get("history", ()), f"{where}: history"):
            turns += [Turn("user", (pair[0],)), Turn("assistant", (pair[1],))]
        answer = _text(raw, "output", where)
        return [*turns, Turn("user", (text,)), Turn("assistant", (answer,))]
    raise DataError(
        f"{where}: the keys {sorted(raw)} match no known format; give {_FORMATS}; see docs/data.md"
    )


def _pairs(value: Any, where: str) -> Sequence[Sequence[str]]:
    pairs = value if _is_list(value) else [value]
    if not all(_is_list(p) and [type(text) for text in p] == [str, str] for p in pairs):
        raise DataError(f"{where} must be a list of pairs of strings, a question and its answer")
    return pairs


def _as_turns(value: Any, role: str, where: str) -> list[Turn]:
    """A string as one turn with this role; a list as messages."""
    if value is None or value == "":
        return [] if role == "system" else [Turn(role, ())]
    if isinstance(value, str):
        return [Turn(role, (value,))]
    return _parse_messages(value, where)


def _parse_messages(messages: Any, where: str) -> list[Turn]:
    if isinstance(messages, str):
        messages = _json(messages, f"{where}: messages")
    if not _is_list(messages):
        raise DataError(f"{where}: messages must be a list, but this is {_kind(messages)}")
    return [_parse_message(m, f"{where}: message {i}") for i, m in enumerate(messages)]


def _parse_message(message: Any, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} must be an object, but this is {_kind(message)}")
    given = message.get("role") or message.get("from")
    role = _ROLE_NAMES.get(given) if isinstance(given, str) else None
    if role is None:
        raise DataError(f"{where} has role {given!r}; known roles: {', '.join(_ROLE_NAMES)}")
    content = _first(message, "content", "value")
    calls = _dicts(message.get("tool_calls") or (), f"{where}: tool_calls")
    if given == "function_call":
        calls, content = _dicts(content, f"{where}: function_call"), None
    parts = _parse_content(content, where)
    if not parts and not calls and role != "system":
        raise DataError(f"{where} ({role}) has no content")
    weight = message.get("weight", message.get("train"))
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: weight is {weight!r}; give 0, 1, true or false")
    trained = None if weight is None else bool(weight)
    return Turn(role, parts, tuple(_parse_call(call, where) for call in calls), trained)


def _parse_content(content: Any, where: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str | Mapping):
        content = [content]
    if not _is_list(content):
        raise DataError(f"{where}: content must be a string or a list, not {_kind(content)}")
    parts = [_parse_part(part, f"{where}, part {i}") for i, part in enumerate(content)]
    return tuple(part for part in parts if part != "")


def _parse_part(part: Any, where: str) -> Part:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise DataError(f"{where} must be a string or an object, but this is {_kind(part)}")
    part = {key: value for key, value in part.items() if value is not None}
    kinds = ("text", "image", "image_url", "video")
    kind = part.get("type") or next((kind for kind in kinds if kind in part), "")
    if kind == "text":
        return _text(part, "text", where)
    if kind in ("image", "image_url"):
        source = _first(part, "image", "image_url", "url", "path")
        if source is None and "base64" in part:
            source = f"data:image;base64,{part['base64']}"
        return AWAITED_IMAGE if source is None else _image(source, where)
    if kind == "video":
        source = _first(part, "video", "url", "path")
        return AWAITED_VIDEO if source is None else _video(source, part.get("fps"), where)
    raise DataError(f"{where} has type {kind!r}; known: text, image, image_url, video")


def _image(source: Any, where: str) -> Image:
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        source = _first(source, "bytes", "url", "path")
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        kind = _kind(source)
        raise DataError(f"{where}: an image is a path, URL, bytes or PIL image, not {kind}")
    return Image(source)


def _video(source: Any, fps: Any, where: str) -> Video:
    if fps is not None and (not isinstance(fps, int | float) or not fps > 0):
        raise DataError(f"{where}: fps is {fps!r}; give frames per second, above 0")
    if isinstance(source, Mapping):
        source = source.get("path") or source.get("url")
    if _is_list(source):
        frames = tuple(_image(frame, f"{where}, frame {i}") for i, frame in enumerate(source))
        if not frames:
            raise DataError(f"{where}: the video has no frames")
        return Video(frames, fps)
    if not isinstance(source, str) or not source:
        raise DataError(f"{where}: a video is a path or a list of frames, not {_kind(source)}")
    return Video(source, fps)


def _column(raw: Mapping[str, Any], kind: str) -> list[Any]:
    value = raw.get(f"{kind}s", raw.get(kind, []))
    return list(value) if _is_list(value) else [value]


def _parse_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name": ..., "arguments": {...}}} from a variant."""
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}: a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: arguments of {name}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: arguments of {name} must be an object, not {_kind(arguments)}")
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _parse_chunks(raw: Mapping[str, Any], where: str) -> Chunks:
    chunks: Any = raw.get("chunks", raw.get("model_input"))
    chunks = chunks.get("chunks") if isinstance(chunks, Mapping) else chunks
    if not _is_list(chunks) or not len(chunks):
        raise DataError(f"{where}: chunks must be a list with at least one chunk")
    parsed = tuple(_parse_chunk(c, f"{where}: chunk {i}") for i, c in enumerate(chunks))
    mask = _first(raw, "mask", "loss_mask", "weights")
    if mask is not None:
        if not _is_list(mask) or any(value not in (0, 1) for value in mask):
            raise DataError(f"{where}: the mask must be a list of 0 and 1, one for each token")
        mask = tuple(bool(value) for value in mask)
    return Chunks(where, parsed, mask)


def _parse_chunk(chunk: Any, where: str) -> tuple[int, ...] | ImageChunk:
    if not isinstance(chunk, Mapping):
        raise DataError(f"{where} must be an object, but this is {_kind(chunk)}")
    chunk = {key: value for key, value in chunk.items() if value is not None}
    if "tokens" in chunk:
        tokens = chunk["tokens"]
        if not _is_list(tokens) or any(type(t) is not int or t < 0 for t in tokens):
            raise DataError(f"{where}: tokens must be a list of token ids")
        return tuple(tokens)
    source = _first(chunk, "data", "image", "location")
    if source is None:
        raise DataError(f"{where} has neither tokens nor an image; its keys are {sorted(chunk)}")
    if isinstance(source, str) and chunk.get("type") == "image" and "data" in chunk:
        source = f"data:image;base64,{source}"  # JSON carries bytes as base64
    expected = chunk.get("expected_tokens")
    if expected is not None and (type(expected) is not int or expected < 1):
        raise DataError(f"{where}: expected_tokens is {expected!r}; give a count, at least 1")
    return ImageChunk(_image(source, where), expected)


def _dicts(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; a single one and a JSON string are understood, too."""
    value = _json(value, where) if isinstance(value, str) else value
    value = [value] if isinstance(value, Mapping) else value
    if not _is_list(value) or not all(isinstance(item, Mapping) for item in value):
        raise DataError(f"{where} must be a list of objects, but this is {_kind(value)}")
    return [dict(item) for item in value]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is a string that is not JSON: {error}") from error


def _text(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be a string, but this is {_kind(value)}")
    return value


def _first(raw: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of these keys that has one."""
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
