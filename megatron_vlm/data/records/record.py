"""Records: a chat of turns, or tokens with images in between; and typed access to the values of the
raw dicts that they are made from. Only the code up to `formats.py` knows about formats."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
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


MARKS = re.compile(r"(<image>|<video>)")
_ANY_MARK = re.compile(r"<(image|video|audio)>")
# These parts have no source: the record's `images` or `videos` column has it.
AWAITED_IMAGE, AWAITED_VIDEO = Image(""), Video("")
_MAX_INT32 = 2**31 - 1  # the largest count
_MIN_RATE, _MAX_NUMBER = 1e-9, 1e9
_SECONDS = "seconds, at least 0"
_RESIZED = (
    "sizes are chosen as Hugging Face's processor does, by bounds: give min_pixels and max_pixels"
)
_NOT_CARRIED_OUT = {
    "resized_height": _RESIZED,
    "resized_width": _RESIZED,
    "raw_fps": "frames of a list are sample_fps apart; if they are not, give times, their seconds",
}
_OF_FILES = ("nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end")
_OF_LISTS = ("sample_fps", "times", "timestamps")
_COUNTS = {"min_frames": 1, "max_frames": 2, "min_pixels": 1, "max_pixels": 1, "total_pixels": 1}
IMAGE_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
VIDEO_OPTIONS = ("fps", *{**_COUNTS, **_NOT_CARRIED_OUT}, *_OF_FILES, *_OF_LISTS)


def place_media(turns: list[ChatMessage], columns: Mapping[str, list[Any]]) -> list[ChatMessage]:
    """Put the columns' images and videos in the places of `<image>` marks and of parts without a
    source or, without such places, at the start of the first user turn, as TRL does."""
    if any(columns.values()):
        turns = [replace(turn, parts=_split_marks(turn.parts, columns)) for turn in turns]
    for kind, awaited in (("image", AWAITED_IMAGE), ("video", AWAITED_VIDEO)):
        column = columns[kind]
        places = sum(part == awaited for turn in turns for part in turn.parts)
        present = any(isinstance(part, type(awaited)) for turn in turns for part in turn.parts)
        if column and not present:
            turns = _prepend(turns, column, kind)
        elif places != len(column):
            raise DataError(
                f": there are {places} {kind} places (<{kind}> marks, or parts without a source) "
                f"but {len(column)} {kind}s",
                key=f"{kind}s",
                remedy="give one for each place",
            )
        source = iter(column)
        turns = [
            replace(turn, parts=tuple(next(source) if p == awaited else p for p in turn.parts))
            for turn in turns
        ]
    return turns


def _split_marks(parts: Sequence[Part], waiting: Mapping[str, list[Any]]) -> tuple[Part, ...]:
    """Split `a <image> b` into text, image, text. A line break after a mark is dropped."""
    new_parts: list[Part] = []
    for part in parts:
        if not isinstance(part, str):
            new_parts.append(part)
            continue
        pieces = MARKS.split(part)
        for index, piece in enumerate(pieces):
            if index % 2 and waiting[piece[1:-1]]:
                new_parts.append(AWAITED_IMAGE if piece == "<image>" else AWAITED_VIDEO)
            elif piece:
                is_after_mark = index and not index % 2 and waiting[pieces[index - 1][1:-1]]
                piece = piece.removeprefix("\n") if is_after_mark else piece
                new_parts += [piece] if piece else []
    return tuple(new_parts)


def _prepend(turns: list[ChatMessage], media: list[Any], kind: str) -> list[ChatMessage]:
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise DataError(f": there are {kind}s but no user message to put them in", key=f"{kind}s")
    turns[first] = replace(turns[first], parts=(*media, *turns[first].parts))
    return turns


def check_lone_marks(texts: Iterable[str], record: Record) -> None:
    """Refuse marks in these texts whose kind of media the record does not have: they would be
    learnt as text. A mark with a closing tag in the same text is HTML."""
    marks = Counter(
        kind for text in texts for kind in _ANY_MARK.findall(text) if f"</{kind}>" not in text
    )
    media = {"image": record.media(Image), "video": record.media(Video), "audio": []}
    for kind, count in marks.items():
        if media[kind]:
            continue
        remedy = "leave such records out" if kind == "audio" else f"give its {kind}s, one for each"
        raise DataError(
            f"has {count} <{kind}> mark{'s' * (count > 1)} and no {kind}, and marks would be "
            "learnt as text",
            remedy=f"{remedy}. If texts mean the word itself, give them as parts, "
            '{"type": "text", "text": ...}, or set data.lone_marks=text',
        )


def join_options(held: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Join the options in the object that holds a medium with those next to it in its part."""
    for key in held.keys() & beside.keys():
        if held[key] != beside[key]:
            raise DataError("occurs twice, with different values", key=key, remedy="give it once")
    return {key: value for key, value in {**held, **beside}.items() if not is_empty(value)}


def image_options(raw_options: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the bounds of an image's pixels."""
    _refuse(raw_options, _NOT_CARRIED_OUT)
    bounds = {key: _count(raw_options.get(key), key, 1) for key in ("min_pixels", "max_pixels")}
    _check_order(bounds, "min_pixels", "max_pixels")
    return bounds


def video_options(raw_options: Mapping[str, Any], num_frames: int | None) -> VideoOptions:
    """Return the options of a list of `num_frames` frames or, where that is None, of a file."""
    _refuse(raw_options, _NOT_CARRIED_OUT)
    misplaced = dict.fromkeys(_OF_FILES, "all frames of a list are taken")
    if num_frames is None:
        misplaced = dict.fromkeys(_OF_LISTS, "it is for a list of frames, not for a file")
    _refuse(raw_options, misplaced)
    nframes = single_value(raw_options, ("nframes", "num_frames"))
    fps = single_value(raw_options, ("fps", "sample_fps"))
    times = single_value(raw_options, ("times", "timestamps"))
    if nframes is not None and raw_options.keys() & {"fps", "min_frames", "max_frames"}:
        raise DataError(
            "sets the number of frames",
            key="nframes",
            found=nframes,
            remedy="leave out fps, min_frames and max_frames, or nframes",
        )
    if times is not None and fps is not None:
        raise DataError(
            "and fps both set the times of the frames", key="times", remedy="give one of them"
        )
    options: dict[str, Any] = {
        key: _count(raw_options.get(key), key, minimum) for key, minimum in _COUNTS.items()
    }
    times_of_clip = ("video_start", "video_end")
    options |= {key: _number(raw_options.get(key), key) for key in times_of_clip}
    for bounds in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"), times_of_clip):
        _check_order(options, *bounds)
    return VideoOptions(
        fps=_number(fps, "fps"),
        nframes=_count(nframes, "nframes", 2),
        times=None if times is None else _times(times, num_frames or 0),
        **options,
    )


def _refuse(options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    for key in options:
        if key in reasons:
            raise DataError(
                f"is not supported here: {reasons[key]}",
                key=key,
                remedy=f"or leave it out, for example by data.ignore_keys=[{key}]",
            )


def _count(value: Any, key: str, minimum: int) -> int | None:
    """Return a whole number. Tables with gaps hold it as a float."""
    if value is None or (
        _is_number(value) and minimum <= value <= _MAX_INT32 and value == int(value)
    ):
        return value if value is None else int(value)
    allowed = f"a whole number, at least {minimum}"
    raise DataError(key=key, found=value, allowed=allowed)


def _number(value: Any, key: str) -> float | None:
    """Return a frame rate or a time."""
    low, allowed = (_MIN_RATE, "frames per second, above 0") if key == "fps" else (0, _SECONDS)
    if value is None or (_is_number(value) and low <= value <= _MAX_NUMBER):
        return None if value is None else float(value)
    raise DataError(key=key, found=value, allowed=allowed)


def _times(value: Any, num_frames: int) -> tuple[float, ...]:
    if not is_list(value):
        raise DataError(f"must be a list of seconds, not {kind_of(value)}", key="times")
    if len(value) != num_frames:
        raise DataError(
            f"has {len(value)} values for {num_frames} frames",
            key="times",
            remedy="give one for each frame",
        )
    for number, time in enumerate(value):
        key = f"times[{number}]"
        if _number(time, key) is None:
            raise DataError(key=key, found=None, allowed=_SECONDS)
    for number, (one, after) in enumerate(pairwise(value), start=1):
        if after < one:
            raise DataError(
                f"is before {one}, the time of the previous frame",
                key=f"times[{number}]",
                found=after,
                remedy="give frames and times in the order of time",
            )
    return tuple(map(float, value))


def _check_order(options: Mapping[str, Any], min_name: str, max_name: str) -> None:
    low, high = options[min_name], options[max_name]
    if low is not None and high is not None and low > high:
        raise DataError(f"is above {max_name}={high}", key=min_name, found=low, remedy="change one")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
