"""Conversion of messages in the formats of OpenAI, Anthropic, ShareGPT, ms-swift and LLaMA-Factory
into turns: their parts, and calls of tools with their results, which formats write in many ways."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import PIL.Image

from megatron_vlm.data.records.keys import Fields, Keys
from megatron_vlm.data.records.record import (
    AWAITED_IMAGE,
    AWAITED_VIDEO,
    IMAGE_OPTIONS,
    VIDEO_OPTIONS,
    ChatMessage,
    Image,
    Part,
    Video,
    both_given,
    dicts,
    image_options,
    is_empty,
    is_list,
    join_options,
    kind_of,
    parse_text,
    require_list,
    require_object,
    text_of,
    video_options,
    weight_of,
)
from megatron_vlm.errors import DataError

# Records name images and videos, or hold their content. Nothing is opened here.

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def media_column(fields: Fields, kind: str, keys: Keys) -> list[Any]:
    """Return the images or videos that a record has in a column of their own."""
    columns = fields.take_all(kind, f"{kind}s")
    filled = [column for column in columns.values() if not is_empty(column)]
    if len(filled) > 1:
        raise both_given(kind, f"{kind}s")
    [value], (_, read, _) = filled or [[]], _MEDIA[kind]
    media = []
    for number, source in enumerate(value if is_list(value) else [value]):
        with keys.at(f"{kind} {number}"):
            media.append(read(source, keys))
    return media


def image_of(source: Any, keys: Keys, beside: Mapping[str, Any] = _NO_OPTIONS) -> Image:
    """Return an image from what names or holds one; `beside` has the options next to it."""
    held = _NO_OPTIONS
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        fields = keys.open(source)
        held = fields.take_all(*IMAGE_OPTIONS)
        # OpenAI's resolution, and Anthropic's notes: the bytes of a picture tell its format.
        fields.take_all("detail", "type", "media_type")
        source = fields.take_first("bytes", "url", "path", "data")
        if "data" in fields and source == fields.take("data"):  # Anthropic's base64
            source = f"data:image;base64,{source}"
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        raise DataError(
            f": an image must be a path, URL, bytes or PIL image, not {kind_of(source)}"
        )
    return Image(source, **image_options(join_options(held, beside)))


def video_of(source: Any, keys: Keys, beside: Mapping[str, Any] = _NO_OPTIONS) -> Video:
    """Return a video from a path, an object that holds one, or a list of frames."""
    held = _NO_OPTIONS
    if isinstance(source, Mapping):
        fields = keys.open(source)
        held, source = fields.take_all(*VIDEO_OPTIONS), fields.take("path", "url", "video")
    options = join_options(held, beside)
    if not is_list(source):
        if not isinstance(source, str) or not source:
            raise DataError(f": a video must be a path or a list of frames, not {kind_of(source)}")
        return Video(source, video_options(options, None))
    frames = []
    for number, frame in enumerate(source):
        with keys.at(f"frame {number}"):
            frames.append(image_of(frame, keys))
    if not frames:
        raise DataError(": the video has no frames")
    if any(frame.min_pixels or frame.max_pixels for frame in frames):
        raise DataError(
            ": frames have min_pixels or max_pixels of their own, and all frames of a video "
            "have one size",
            remedy="give min_pixels and max_pixels beside the video",
        )
    return Video(tuple(frames), video_options(options, len(frames)))


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
_MEDIA: dict[str, tuple[Part, Callable[..., Part], tuple[str, ...]]] = {
    "image": (AWAITED_IMAGE, image_of, IMAGE_OPTIONS),
    "video": (AWAITED_VIDEO, video_of, VIDEO_OPTIONS),
}


def parse_messages(messages: Any, keys: Keys) -> list[ChatMessage]:
    """Parse a list of messages, which may be JSON text."""
    if isinstance(messages, str):
        messages = parse_text(messages, "messages")
    turns: list[ChatMessage] = []
    for number, message in enumerate(require_list(messages, "messages")):
        with keys.at(f"message {number}"):
            for piece in split_results(message, keys):
                turn = _parse_message(piece, keys)
                if _speaker(piece) in _CALLERS and turns and turns[-1].role == "assistant":
                    turns[-1] = _with_calls(turns[-1], turn)
                else:
                    turns.append(turn)
    return turns


def _with_calls(said: ChatMessage, calls: ChatMessage) -> ChatMessage:
    """Return one message of what the assistant said and the calls in the next message."""
    if said.weight != calls.weight:
        raise DataError(
            "differs from that of the message before, and both are one answer",
            key="weight",
            found=calls.weight,
            remedy="give them the same",
        )
    return replace(said, tool_calls=said.tool_calls + calls.tool_calls)


def _parse_message(message: Any, keys: Keys) -> ChatMessage:
    fields, speaker = keys.open(message), _speaker(message)
    role = _ROLE_NAMES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(key="role", found=speaker, allowed=tuple(_ROLE_NAMES))
    # The last two change nothing; some templates show the name of a tool's answer.
    fields.take_all("role", "from", "metadata", "name")
    content = fields.take("content", "value")
    calls = fields.dicts("tool_calls") + fields.dicts("function_call")
    if speaker in _CALLERS:
        calls, content = dicts(content, speaker), None
    by_kind = _parse_content(content, keys)
    thoughts = fields.take(*_REASONING)
    texts = [*by_kind["reasoning"], *([] if is_empty(thoughts) else [thoughts])]
    reasoning = "".join(text_of(text, "reasoning") for text in texts)
    calls += by_kind["tool_call"]
    if reasoning and role != "assistant":
        raise DataError(
            f"is in a message of role {role}; only messages of the assistant have it",
            key="reasoning",
        )
    weight = fields.take(*_WEIGHTS)
    of_result = fields.take_all("name", "tool_call_id") if role == "tool" else {}
    is_shown = role == "system" or (role == "assistant" and weight == 0)  # and not learnt
    if not by_kind["parts"] and not calls and not is_shown:
        keys.check_opened()  # most likely the message is not empty, and an unknown key has it
        raise DataError(
            f"is empty in a message of role {role}",
            key="content",
            remedy="write it, or leave the record out",
        )
    name, call_id = (of_result.get(key) for key in ("name", "tool_call_id"))
    return ChatMessage(
        role,
        tuple(by_kind["parts"]),
        tuple(parse_call(call, keys) for call in calls),
        None if weight is None else weight_of(weight, "weight"),
        reasoning,
        name if isinstance(name, str) else "",
        call_id if isinstance(call_id, str) else "",
    )


def _speaker(message: Mapping[str, Any]) -> Any:
    """Return the role as the message spells it."""
    role, name = message.get("role"), message.get("from")
    known = isinstance(role, str) and isinstance(name, str)
    if known and role and name and _ROLE_NAMES.get(role) != _ROLE_NAMES.get(name):
        raise DataError(f"and from={name!r} differ", key="role", found=role, remedy="give one")
    return role or name


def _parse_content(content: Any, keys: Keys) -> dict[str, list[Any]]:
    """Return the parts in the order of display, and the reasoning and the calls among them."""
    by_kind: dict[str, list[Any]] = {"parts": [], "reasoning": [], "tool_call": []}
    if isinstance(content, str | Mapping):
        content = [content]
    if content is not None and not is_list(content):
        raise DataError(f"must be a string or a list, not {kind_of(content)}", key="content")
    for number, part in enumerate(content or ()):
        with keys.at(f"part {number}"):
            kind, value = _parse_part(part, keys)
        by_kind[kind] += value
    return by_kind


def _parse_part(part: Any, keys: Keys) -> tuple[str, Sequence[Any]]:
    """Return the kind of a part, parts, reasoning or tool_call, and what it has."""
    if isinstance(part, str):
        keys.marked.append(part)
        return "parts", [part] * bool(part)
    if not isinstance(part, Mapping):
        raise DataError(f"must be a string or an object, not {kind_of(part)}")
    type_name = part.get("type") or next(
        (kind for kind in _KINDS if part.get(kind) is not None), ""
    )
    if isinstance(type_name, str) and type_name in keys.ignored:
        return "parts", ()
    if type_name == "tool_use":  # Anthropic's part is the call itself
        return "tool_call", [dict(part)]
    kind = _KINDS.get(type_name) if isinstance(type_name, str) else None
    if kind is None:
        raise DataError(key="type", found=type_name, allowed=tuple(_KINDS))
    fields = keys.open(part)
    fields.take_all("type", "cache_control", "signature")  # Anthropic's notes change nothing
    value = fields.take(*_PARTS[kind])
    if kind == "tool_call":
        return kind, dicts(value, kind)
    if kind in _MEDIA:
        return "parts", [_parse_medium(kind, value, fields, keys)]
    text = text_of(value, kind)
    return ("parts" if kind == "text" else kind), [text] * bool(text)


def _parse_medium(kind: str, value: Any, fields: Fields, keys: Keys) -> Part:
    """Return the image or video of a part, with its options, or the sign that a column has it."""
    awaited, read, names = _MEDIA[kind]
    if kind == "image":
        held = fields.take_first("base64", "binary")
        if value is None and held is not None:
            value = held if isinstance(held, bytes) else f"data:image;base64,{held}"
    options = fields.take_all(*names)
    _check_index(fields.take("index"), kind, keys)
    if value is not None:
        return read(value, keys, options)
    if options:
        first = min(options)
        raise DataError(
            f"is an option of a part without {kind}",
            key=first,
            remedy=f'give both in the record\'s {kind}s: {{"path": ..., "{first}": ...}}',
        )
    return awaited


def _check_index(index: Any, kind: str, keys: Keys) -> None:
    """Check that trl's `index` of a picture is its place among the record's pictures."""
    place = keys.media_parts[kind]
    keys.media_parts[kind] += 1
    if index is not None and (type(index) not in (int, float) or index != place):
        raise DataError(
            f"is not the place of this {kind}, and they are taken in order",
            key="index",
            found=index,
            allowed=place,
            remedy=f"put the {kind}s in the order of their parts",
        )


_OF_CALLS = ("type", "id", "index", "cache_control")  # a call's keys beside its name and arguments
_RESULT = "tool_result"  # type of Anthropic's parts with the answer of a tool


def parse_call(call: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Convert a call to {"type": "function", "function": {"name": ..., "arguments": {...}}}, with
    its id, if it has one."""
    if call.get("type") == "tool_use":  # Anthropic's
        call = {{"input": "arguments"}.get(k, k): v for k, v in call.items() if k != "type"}
    with keys.at("a tool call"):
        fields = keys.open(call)
        fields.take_all(*_OF_CALLS)
        if call.get("type") not in (None, "function"):
            raise DataError(key="type", found=call["type"], allowed="function")
        if call.get("function") is not None:
            fields.take("function")
            if not isinstance(call["function"], Mapping):
                raise DataError("is missing", key="function.name")
            fields = keys.open(call["function"])
            fields.take_all(*_OF_CALLS)
        name, arguments = fields.take("name"), fields.take("arguments")
        if not isinstance(name, str) or not name:
            raise DataError("is missing", key="function.name")
        if isinstance(arguments, str):
            arguments = parse_text(arguments, f"arguments of {name}")
        given = require_object({} if arguments is None else arguments, f"arguments of {name}")
    numbered = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": name, "arguments": dict(given)}
    return {"type": "function", **numbered, "function": function}


def split_results(message: Any, keys: Keys) -> list[Any]:
    """Return the messages that one of Anthropic's is: results of tools, which come as parts of a
    user's message, are messages of their own."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    if not is_list(content) or message.get("role") != "user":
        return [message]
    is_result = [isinstance(part, Mapping) and part.get("type") == _RESULT for part in content]
    if not any(is_result):
        return [message]
    if is_result != sorted(is_result, reverse=True):
        raise DataError(
            ": results of tools come before the other parts of a message", key="content"
        )
    pieces: list[Any] = []
    for number, result in enumerate(content[: sum(is_result)]):
        with keys.at(f"part {number}"):
            fields = keys.open(result)
        fields.take_all("type", "cache_control")
        content_of_result, call = fields.take("content"), fields.take("tool_use_id")
        pieces.append({"role": "tool", "content": content_of_result, "tool_call_id": call})
    rest = content[len(pieces) :]
    return [*pieces, {**message, "content": rest}] if rest else pieces


def parse_tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    """Return a record's tools, each as {"type": "function", "function": {...}}, as ms-swift and
    LLaMA-Factory wrap them. OpenAI's older `functions` become tools."""
    tools, functions = fields.dicts("tools"), fields.dicts("functions")
    if tools and functions:
        raise both_given("tools", "functions")
    return tuple(map(_wrap_tool, tools + functions))


def _wrap_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "name" not in tool or "function" in tool or tool.get("type") not in (None, "function"):
        return tool
    names = {"input_schema": "parameters"}  # Anthropic's name
    function = {names.get(key, key): value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
