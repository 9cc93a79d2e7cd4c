"""Images and videos as records give them: named or held, never opened here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import PIL.Image

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.media_options import (
    IMAGE_OPTIONS,
    VIDEO_OPTIONS,
    image_options,
    joined,
    video_options,
)
from megatron_vlm.data.records.record import Image, Video
from megatron_vlm.data.records.record_values import is_empty, is_list, kind_of, only
from megatron_vlm.errors import DataError

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def column(raw: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    """The images or videos that a record has in a column of their own."""
    names = [name for name in (kind, f"{kind}s") if not is_empty(raw.get(name))]
    if len(names) > 1:
        raise DataError(
            f"and {kind}s both have a value", place=where, key=kind, remedy="give one of them"
        )
    value = raw[names[0]] if names else []
    return list(value) if is_list(value) else [value]


def image_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Image:
    """An image given as a path, URL, bytes, PIL image, or an object that holds one of them.
    `beside` are the other keys of its part."""
    held: Mapping[str, Any] = _NOTHING
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        held = keys.read(source, {"bytes", "url", "path", "detail", *IMAGE_OPTIONS}, where)
        if held.pop("detail", "auto") != "auto":  # OpenAI's resolution
            keys.read({"detail": source["detail"]}, (), where)
        source = next((held[key] for key in ("bytes", "url", "path") if key in held), None)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        raise DataError(
            f": an image must be a path, URL, bytes or PIL image, not {kind_of(source)}",
            place=where,
        )
    return Image(source, **image_options(joined(held, beside, IMAGE_OPTIONS, where), where))


def video_of(source: Any, where: str, keys: Keys, beside: Mapping[str, Any] = _NOTHING) -> Video:
    """A video given as a path, an object that holds one, or a list of frames. `beside` as for an
    image."""
    held: Mapping[str, Any] = _NOTHING
    if isinstance(source, Mapping):
        held = keys.read(source, {"path", "url", "video", *VIDEO_OPTIONS}, where)
        source = only(held, ("path", "url", "video"), where)
    given = joined(held, beside, VIDEO_OPTIONS, where)
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
        return Video(frames, video_options(given, len(frames), where))
    if not isinstance(source, str) or not source:
        raise DataError(
            f": a video must be a path or a list of frames, not {kind_of(source)}", place=where
        )
    return Video(source, video_options(given, None, where))
