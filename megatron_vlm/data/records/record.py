"""Records: a chat of turns, or tokens with images in between; and typed access to the values of the
raw dicts that they are made from. Only the code up to `formats.py` knows about formats."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import PIL.Image

from megatron_vlm.errors import DataError
from megatron_vlm.family.video_plan import VideoOptions
from megatron_vlm.io.untrusted import UntrustedFile

_NO_OPTIONS = VideoOptions()
_MIN_WEIGHT, _MAX_WEIGHT = 1e-20, 1e20  # float32 holds these weights and sums of their losses


@dataclass(frozen=True)
class Image:
    """An image that is not opened yet: a path or URL, the bytes of a file, or a PIL image."""

    source: str | bytes | PIL.Image.Image
    min_pixels: int | None = None  # in the resized image; None: as for all images
    max_pixels: int | None = None

    @property
    def name(self) -> str:
        """A short name for messages."""
        if isinstance(self.source, str):
            return self.source if len(self.source) <= 120 else self.source[:100] + "..."
        return "an image given as " + ("bytes" if isinstance(self.source, bytes) else "PIL image")


@dataclass(frozen=True)
class Video:
    """A video file, or a list of frames."""

    source: str | tuple[Image, ...]
    options: VideoOptions = _NO_OPTIONS

    @property
    def name(self) -> str:
        """A short name for messages."""
        source = self.source
        return source if isinstance(source, str) else f"a video of {len(source)} frames"


Part = str | Image | Video


@dataclass(frozen=True)
class ChatMessage:
    """A message of a chat, with the weight of its loss if the record gives one."""

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    weight: float | None = None  # 0: not trained
    reasoning: str = ""  # an assistant's thoughts before its answer
    name: str = ""  # the name of the tool, in its result
    call_id: str = ""  # the id of the call, in the result of a tool


@dataclass(frozen=True)
class Box:
    """A box [x1, y1, x2, y2] or a point [x, y] on an image of the chat."""

    numbers: tuple[float, ...]
    unit: str  # real: pixels; norm1, norm1000: parts or thousandths of the picture's sides
    image: int  # number among the images of the chat


@dataclass(frozen=True)
class Objects:
    """Values of the marks `<ref-object>` and `<bbox>` in the texts, in the order of each kind."""

    refs: tuple[str, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Conversation:
    """Turns that the tokenizer's chat template renders."""

    where: str  # file and line, for messages
    turns: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    objects: Objects | None = None  # None: the marks, if any, are plain text
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    is_continued: bool = False  # as a prompt, it ends within its last answer

    def media(self, kind: type) -> list[Any]:
        """Return all images, or all videos, in the order in which the model sees them."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, kind)]


@dataclass(frozen=True)
class ImageChunk:
    """An image among tokens, and the number of tokens that its maker expects it to take."""

    image: Image
    expected_tokens: int | None


@dataclass(frozen=True)
class EncodedRecord:
    """Tokens that were encoded elsewhere, with images in between, and the weight of each token."""

    where: str
    chunks: tuple[tuple[int, ...] | ImageChunk, ...]
    mask: tuple[float, ...] | None  # 0: not trained; None: all are trained

    def media(self, kind: type) -> list[Any]:
        """Return all images, in order; chunk lists have no videos."""
        images = [chunk.image for chunk in self.chunks if isinstance(chunk, ImageChunk)]
        return images if kind is Image else []


Record = Conversation | EncodedRecord


def dicts(value: Any, key: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects. A single object and a JSON string are accepted, too."""
    value = parse_text(value, key) if isinstance(value, str) else value
    value = [value] if isinstance(value, Mapping) else value
    if not is_list(value) or not all(isinstance(item, Mapping) for item in value):
        raise DataError(f"must be a list of objects, not {kind_of(value)}", key=key)
    try:  # transformers 5.23 shows only the type of values that tables hold and JSON cannot
        json.dumps([*value], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"must be JSON: {error}", key=key) from error
    return [dict(item) for item in value]


def parse_text(text: str, key: str) -> Any:
    """Parse the JSON text at this key."""
    try:
        return UntrustedFile("").parse(text, "is a string that is not JSON")
    except DataError as error:
        raise DataError(**error.fields() | {"key": key}) from error


def text_of(value: Any, key: str) -> str:
    """Return the value, which must be a string."""
    if not isinstance(value, str):
        raise DataError(f"must be a string, not {kind_of(value)}", key=key)
    return value


def require_list(value: Any, key: str) -> Sequence[Any]:
    """Return the value, which must be a list."""
    if not is_list(value):
        raise DataError(f"must be a list, not {kind_of(value)}", key=key)
    return value


def require_object(value: Any, key: str = "") -> Mapping[str, Any]:
    """Return the value, which must be an object."""
    if not isinstance(value, Mapping):
        raise DataError(f"must be an object, not {kind_of(value)}", key=key)
    return value


def require_record(raw: Any, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys of a raw record that have a value and are not ignored."""
    if not isinstance(raw, Mapping):
        raise DataError(f": a record must be a JSON object, not {kind_of(raw)}")
    return {key: value for key, value in raw.items() if value is not None and key not in ignored}


def weight_of(value: Any, key: str) -> float:
    """Return a loss weight, of a message or a token. True is 1, and false is 0."""
    if isinstance(value, bool | int | float) and (not value or _MIN_WEIGHT <= value <= _MAX_WEIGHT):
        return float(value)
    allowed = (
        f"0 (or false), 1 (or true), or another weight from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
    )
    raise DataError(key=key, found=value, allowed=allowed)


def single_value(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value at one of these keys, which all mean the same; None if all are absent."""
    values = {name: raw[name] for name in names if raw.get(name) is not None}
    filled = {name: value for name, value in values.items() if not is_empty(value)}
    first, *others = [*(filled or values).items()] or [("", None)]
    for name, value in others:
        if filled and value != first[1]:
            raise DataError(
                f"and {name} mean the same and differ", key=first[0], remedy="give one of them"
            )
    return first[1]


def both_given(one: str, other: str) -> DataError:
    """Return the error of a record with values at two keys of which it may have one."""
    return DataError(f"and {other} both have a value", key=one, remedy="give one of them")


def is_empty(value: Any) -> bool:
    """Return whether a value counts as absent: null, or a text, list or object with no content."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | bytes | Sequence) and not len(value))


def is_list(value: Any) -> bool:
    """Return whether the value is a list, of any type, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def kind_of(value: Any) -> str:
    """Return the type of a value, for messages."""
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
