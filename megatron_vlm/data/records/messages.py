"""Conversion of messages in the formats of OpenAI, ShareGPT and LLaMA-Factory into turns."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import PIL.Image

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.media_options import (
    IMAGE_OPTIONS,
    VIDEO_OPTIONS,
    image_options,
    join_options,
    video_options,
)
from megatron_vlm.data.records.placeholders import AWAITED_IMAGE, AWAITED_VIDEO
from megatron_vlm.data.records.record import ChatMessage, Image, Part, Video
from megatron_vlm.data.records.record_values import (
    dicts,
    is_empty,
    is_list,
    kind_of,
    parse_text,
    single_value,
    text_of,
    weight_of,
)
from megatron_vlm.errors import DataError

# Records name images and videos, or hold their content. Nothing is opened here.

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def column(raw: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    """Return the images or videos that a record has in a column of their own."""
    names = [name for name in (kind, f"{kind}s") if not is_empty(raw.get(name))]
    if len(names) > 1:
        raise DataError(
            f"and {kind}s both have a value", place=where, key=kind, remedy="give one of them"
        )
    value = raw[names[0]] if names else []
    return list(value) if is_list(value) else [value]


def image_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Image:
    """Return an image from a path, URL, bytes, PIL image, or an object that holds one of them.
    `beside` holds the other keys of its part."""
    fields: Mapping[str, Any] = _NOTHING
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        fields = keys.read(source, {"bytes", "url", "path", "detail", *IMAGE_OPTIONS}, where)
        if fields.pop("detail", "auto") != "auto":  # OpenAI's resolution
            keys.read({"detail": source["detail"]}, (), where)
        source = next((fields[key] for key in ("bytes", "url", "path") if key in fields), None)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        raise DataError(
            f": an image must be a path, URL, bytes or PIL image, not {kind_of(source)}",
            place=where,
        )
    return Image(source, **image_options(join_options(fields, beside, IMAGE_OPTIONS, where), where))


def video_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Video:
    """Return a video from a path, an object that holds one, or a list of frames. `beside` holds the
    other keys of its part."""
    fields: Mapping[str, Any] = _NOTHING
    if isinstance(source, Mapping):
        fields = keys.read(source, {"path", "url", "video", *VIDEO_OPTIONS}, where)
        source = single_value(fields, ("path", "url", "video"), where)
    options = join_options(fields, beside, VIDEO_OPTIONS, where)
    if is_list(source):
        frames = tuple(image_of(f, f"{where}, frame {i}", keys) for i, f in enumerate(source))
        if not frames:
            raise DataError(": the video has no frames", place=where)
        if any(frame.min_pixels or frame.max_pixels for frame in frames):
            raise DataError(
                ": frames have min_pixels or max_pixels of their own, and all frames of a video "
                "have one size",
                place=where,
                remedy="give min_pixels and max_pixels beside the video",
            )
        return Video(frames, video_options(options, len(frames), where))
    if not isinstance(source, str) or not source:
        raise DataError(
            f": a video must be a path or a list of frames, not {kind_of(source)}", place=where
        )
    return Video(source, video_options(options, None, where))


_ROLE_NAMES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "bing"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
}
_WEIGHTS = ("weight", "loss_weight", "train", "loss")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MESSAGE = {"role", "from", "content", "value", "tool_calls", *_WEIGHTS, *_REASONING}
_ANSWER = {"tool_call_id", "name"}  # the call of an answer; templates show answers in order
# The content of each kind of part is at one of these keys.
_PARTS = {
    "text": ("text", "value"),
    "image": ("image", "image_url", "url", "path", "value"),
    "video": ("video", "video_url", "url", "path", "value"),
    "reasoning": (*_REASONING, "text", "value"),
    "tool_call": ("tool_call", "value"),
}
_KINDS = {
    **{kind: kind for kind in _PARTS},
    **{"image_url": "image", "video_url": "video", "thinking": "reasoning"},
}
_MORE = {"image": IMAGE_OPTIONS | {"base64"}, "video": VIDEO_OPTIONS}
_MEDIA = {"image": (AWAITED_IMAGE, image_of), "video": (AWAITED_VIDEO, video_of)}


def parse_messages(messages: Any, where: str, keys: Keys) -> list[ChatMessage]:
    """Parse a list of messages, which may be JSON text."""
    if isinstance(messages, str):
        messages = parse_text(messages, "messages", where)
    if not is_list(messages):
        raise DataError(f"must be a list, not {kind_of(messages)}", place=where, key="messages")
    return [_parse_message(m, f"{where}: message {i}", keys) for i, m in enumerate(messages)]


def _parse_message(message: Any, where: str, keys: Keys) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise DataError(f"must be an object, not {kind_of(message)}", place=where)
    speaker = _speaker(message, where)
    role = _ROLE_NAMES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(place=where, key="role", found=speaker, allowed=tuple(_ROLE_NAMES))
    message = keys.read(message, _MESSAGE | (_ANSWER if role == "tool" else set()), where)
    content = single_value(message, ("content", "value"), where)
    calls = dicts(message.get("tool_calls") or (), "tool_calls", where)
    if speaker == "function_call":
        calls, content = dicts(content, "function_call", where), None
    by_kind = _parse_content(content, where, keys)
    thoughts = single_value(message, _REASONING, where)
    texts = [*by_kind["reasoning"], *([] if is_empty(thoughts) else [thoughts])]
    reasoning = "".join(text_of(text, "reasoning", where) for text in texts)
    calls += by_kind["tool_call"]
    if reasoning and role != "assistant":
        raise DataError(
            f"is in a message of role {role}; only messages of the assistant have it",
            place=where,
            key="reasoning",
        )
    if not by_kind["parts"] and not calls and role != "system":
        raise DataError(f"is empty in a message of role {role}", place=where, key="content")
    weight = single_value(message, _WEIGHTS, where)
    return ChatMessage(
        role,
        tuple(by_kind["parts"]),
        tuple(_parse_call(call, where, keys) for call in calls),
        None if weight is None else weight_of(weight, "weight", where),
        reasoning,
    )


def _speaker(message: Mapping[str, Any], where: str) -> Any:
    """Return the role as the message spells it."""
    role, name = message.get("role"), message.get("from")
    known = isinstance(role, str) and isinstance(name, str)
    if known and role and name and _ROLE_NAMES.get(role) != _ROLE_NAMES.get(name):
        raise DataError(
            f"and from={name!r} differ", place=where, key="role", found=role, remedy="give one"
        )
    return role or name


def _parse_content(content: Any, where: str, keys: Keys) -> dict[str, list[Any]]:
    """Return the parts in the order of display and, apart from them, the reasoning and the calls
    that some formats put among the parts."""
    by_kind: dict[str, list[Any]] = {"parts": [], "reasoning": [], "tool_call": []}
    if isinstance(content, str | Mapping):
        content = [content]
    if content is not None and not is_list(content):
        raise DataError(
            f"must be a string or a list, not {kind_of(content)}", place=where, key="content"
        )
    for number, part in enumerate(content or ()):
        place = f"{where}, part {number}"
        kind = _kind_of_part(part) if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in keys.ignored:
            continue
        keys.marked += [part] if isinstance(part, str) else []
        kind, value = ("text", part) if isinstance(part, str) else _parse_part(part, place, keys)
        if kind == "tool_call":
            by_kind[kind] += dicts(value, kind, place)
        elif value != "":
            by_kind[kind if kind == "reasoning" else "parts"].append(value)
    return by_kind


def _parse_part(part: Any, where: str, keys: Keys) -> tuple[str, Part | Any]:
    """Return the kind of a part, and its content."""
    if not isinstance(part, Mapping):
        raise DataError(f"must be a string or an object, not {kind_of(part)}", place=where)
    type_name = _kind_of_part(part)
    kind = _KINDS.get(type_name) if isinstance(type_name, str) else None
    if kind is None:
        raise DataError(place=where, key="type", found=type_name, allowed=tuple(_KINDS))
    more = _MORE.get(kind, frozenset())
    part = keys.read(part, {"type", *_PARTS[kind], *more}, where)
    value = single_value(part, _PARTS[kind], where)
    if kind in ("text", "reasoning"):
        return kind, text_of(value, kind, where)
    if kind == "image" and value is None and "base64" in part:
        value = f"data:image;base64,{part['base64']}"
    if kind in _MEDIA:
        awaited, read = _MEDIA[kind]
        if value is not None:
            return kind, read(value, where, keys, part)
        if options := sorted(part.keys() & _MORE[kind]):
            raise DataError(
                f"is an option of a part without {kind}",
                place=where,
                key=options[0],
                remedy=f'give both in the record\'s {kind}s: {{"path": ..., "{options[0]}": ...}}',
            )
        return kind, awaited
    return kind, value


def _kind_of_part(part: Mapping[str, Any]) -> Any:
    """Return the type that a part states, or else the kind that its keys tell."""
    return part.get("type") or next((kind for kind in _KINDS if part.get(kind) is not None), "")


def _parse_call(call: Mapping[str, Any], where: str, keys: Keys) -> dict[str, Any]:
    """Convert a variant of a call to {"type": "function", "function": {"name": ..., "arguments":
    {...}}}."""
    place, own = f"{where}, a tool call", {"type", "id", "index"}
    function = call.get("function")
    if function is None:
        function = keys.read(call, {*own, "name", "arguments"}, place)
    else:
        keys.read(call, {*own, "function"}, place)
    if call.get("type") not in (None, "function"):
        raise DataError(place=place, key="type", found=call["type"], allowed="function")
    if isinstance(function, Mapping):
        function = keys.read(function, {*own, "name", "arguments"}, place)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError("is missing", place=place, key="function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments, f"arguments of {name}", where)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"must be an object, not {kind_of(arguments)}", place=where, key=f"arguments of {name}"
        )
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
