"""Conversion of messages in the formats of OpenAI, ShareGPT and LLaMA-Factory into turns."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import PIL.Image

from megatron_vlm.data.records.keys import Keys, UnknownKeysError
from megatron_vlm.data.records.record import (
    ChatMessage,
    Image,
    Part,
    Video,
    dicts,
    is_empty,
    is_list,
    kind_of,
    parse_text,
    require_list,
    require_object,
    single_value,
    text_of,
    weight_of,
)
from megatron_vlm.data.records.record_media import (
    AWAITED_IMAGE,
    AWAITED_VIDEO,
    IMAGE_OPTIONS,
    VIDEO_OPTIONS,
    image_options,
    join_options,
    video_options,
)
from megatron_vlm.data.records.tool_calls import parse_call, split_results
from megatron_vlm.errors import DataError

# Records name images and videos, or hold their content. Nothing is opened here.

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SOURCES = ("bytes", "url", "path", "data")  # data: Anthropic's base64
# OpenAI's resolution, and Anthropic's notes: the bytes of a picture tell its format.
_WITHOUT_EFFECT_ON_IMAGES = ("detail", "type", "media_type")


def media_column(raw: Mapping[str, Any], kind: str, keys: Keys) -> list[Any]:
    """Return the images or videos that a record has in a column of their own."""
    names = [name for name in (kind, f"{kind}s") if not is_empty(raw.get(name))]
    if len(names) > 1:
        raise DataError(
            f"and {kind}s both have a value", place=keys.where, key=kind, remedy="give one of them"
        )
    value, (_, read) = raw[names[0]] if names else [], _MEDIA[kind]
    values = value if is_list(value) else [value]
    return [read(each, f"{keys.where}: {kind} {i}", keys) for i, each in enumerate(values)]


def image_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Image:
    """Return an image from what names or holds one; `beside` has the other keys of its part."""
    fields: Mapping[str, Any] = _NOTHING
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        fields = keys.read(source, {*_SOURCES, *_WITHOUT_EFFECT_ON_IMAGES, *IMAGE_OPTIONS}, where)
        source = next((fields[key] for key in _SOURCES if key in fields), None)
        if "data" in fields and source == fields["data"]:
            source = f"data:image;base64,{source}"
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        raise DataError(
            f": an image must be a path, URL, bytes or PIL image, not {kind_of(source)}",
            place=where,
        )
    return Image(source, **image_options(join_options(fields, beside, IMAGE_OPTIONS, where), where))


def video_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Video:
    """Return a video from a path, an object that holds one, or a list of frames."""
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


_CALLERS = ("function_call", "tool_call")  # roles whose content is a call, or a list of calls
_ROLE_NAMES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "bing"), "assistant"),
    **dict.fromkeys(_CALLERS, "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
_WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MESSAGE = {"role", "from", "content", "value", "tool_calls", "function_call"}
# The first two change nothing; some templates show the name of a tool's answer.
_MESSAGE |= {"name", "metadata", *_WEIGHTS, *_REASONING}
_ANSWER = {"tool_call_id"}  # the call of an answer
# The content of each kind of part is at one of these keys.
_PARTS = {
    "text": ("text", "value", "content"),
    "image": ("image", "image_url", "url", "path", "value", "content", "source"),
    "video": ("video", "video_url", "url", "path", "value"),
    "reasoning": (*_REASONING, "text", "value"),
    "tool_call": ("tool_call", "value"),
}
_KINDS = {
    **{kind: kind for kind in _PARTS},
    **{"image_url": "image", "video_url": "video", "thinking": "reasoning"},
    **{"image_path": "image", "image_binary": "image"},
}
_MORE = {"image": IMAGE_OPTIONS | {"base64", "binary", "index"}, "video": VIDEO_OPTIONS | {"index"}}
_WITHOUT_EFFECT = ("cache_control", "signature")  # keys of Anthropic's parts
_MEDIA = {"image": (AWAITED_IMAGE, image_of), "video": (AWAITED_VIDEO, video_of)}


def parse_messages(messages: Any, where: str, keys: Keys) -> list[ChatMessage]:
    """Parse a list of messages, which may be JSON text."""
    if isinstance(messages, str):
        messages = parse_text(messages, "messages", where)
    turns: list[ChatMessage] = []
    for number, message in enumerate(require_list(messages, "messages", where)):
        place = f"{where}: message {number}"
        for piece in split_results(message, place, keys):
            turn = _parse_message(piece, place, keys)
            is_call = isinstance(piece, Mapping) and _speaker(piece, place) in _CALLERS
            if is_call and turns and turns[-1].role == "assistant":
                turns[-1] = _with_calls(turns[-1], turn, place)
            else:
                turns.append(turn)
    return turns


def _with_calls(said: ChatMessage, calls: ChatMessage, where: str) -> ChatMessage:
    """Return one message of what the assistant said and the calls in the next message."""
    if said.weight != calls.weight:
        raise DataError(
            "differs from that of the message before, and both are one answer",
            place=where,
            key="weight",
            found=calls.weight,
            remedy="give them the same",
        )
    return replace(said, tool_calls=said.tool_calls + calls.tool_calls)


def _parse_message(message: Any, where: str, keys: Keys) -> ChatMessage:
    speaker = _speaker(require_object(message, where), where)
    role = _ROLE_NAMES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(place=where, key="role", found=speaker, allowed=tuple(_ROLE_NAMES))
    message = keys.read(message, _MESSAGE | (_ANSWER if role == "tool" else set()), where)
    content = single_value(message, ("content", "value"), where)
    calls = dicts(message.get("tool_calls") or (), "tool_calls", where)
    calls += dicts(message.get("function_call") or (), "function_call", where)
    if speaker in _CALLERS:
        calls, content = dicts(content, str(speaker), where), None
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
        if keys.unknown:  # most likely the message is not empty, and one of these keys has it
            raise UnknownKeysError.from_keys(keys.where, keys.unknown, keys.ignored)
        raise DataError(
            f"is empty in a message of role {role}",
            place=where,
            key="content",
            remedy="write it, or leave the record out",
        )
    weight = single_value(message, _WEIGHTS, where)
    of_call = (message.get(key) for key in ("name", "tool_call_id") if role == "tool")
    return ChatMessage(
        role,
        tuple(by_kind["parts"]),
        tuple(parse_call(call, where, keys) for call in calls),
        None if weight is None else weight_of(weight, "weight", where),
        reasoning,
        *(each if isinstance(each, str) else "" for each in of_call),
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
    """Return the parts in the order of display, and the reasoning and the calls among them."""
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
        if kind == "tool_use":  # Anthropic's part is the call itself
            by_kind["tool_call"].append(dict(part))
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
    part = keys.read(part, {"type", *_PARTS[kind], *more, *_WITHOUT_EFFECT}, where)
    value = single_value(part, _PARTS[kind], where)
    if kind in ("text", "reasoning"):
        return kind, text_of(value, kind, where)
    if kind == "image" and value is None and (encoded := part.keys() & {"base64", "binary"}):
        held = part[min(encoded)]
        value = held if isinstance(held, bytes) else f"data:image;base64,{held}"
    if kind in _MEDIA:
        _check_index(part.get("index"), kind, where, keys)
        awaited, read = _MEDIA[kind]
        if value is not None:
            return kind, read(value, where, keys, part)
        if options := sorted(part.keys() & _MORE[kind] - {"index"}):
            raise DataError(
                f"is an option of a part without {kind}",
                place=where,
                key=options[0],
                remedy=f'give both in the record\'s {kind}s: {{"path": ..., "{options[0]}": ...}}',
            )
        return kind, awaited
    return kind, value


def _check_index(index: Any, kind: str, where: str, keys: Keys) -> None:
    """Check that trl's `index` of a picture is its place among those of the record."""
    place = keys.media_parts[kind]
    keys.media_parts[kind] += 1
    if index is not None and (type(index) not in (int, float) or index != place):
        raise DataError(
            f"is not the place of this {kind}, and they are taken in order",
            place=where,
            key="index",
            found=index,
            allowed=place,
            remedy=f"put the {kind}s in the order of their parts",
        )


def _kind_of_part(part: Mapping[str, Any]) -> Any:
    """Return the type that a part states, or else the kind that its keys tell."""
    return part.get("type") or next((kind for kind in _KINDS if part.get(kind) is not None), "")
