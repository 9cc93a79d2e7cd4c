"""Images and videos of a record: the places of those that the record has in columns of their own,
and their options, named as in qwen-vl-utils."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_vlm.data.records.record import (
    ChatMessage,
    Image,
    Part,
    Record,
    Video,
    is_empty,
    is_list,
    kind_of,
    single_value,
)
from megatron_vlm.errors import DataError
from megatron_vlm.family.video_plan import VideoOptions

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
