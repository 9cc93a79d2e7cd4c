"""Images and videos as records give them: named or held, never opened here."""

from collections.abc import Mapping
from typing import Any

import PIL.Image

from megatron_vlm.data.read.keys import Keys
from megatron_vlm.data.read.records import Image, Video
from megatron_vlm.data.read.values import is_empty, is_list, kind_of, only
from megatron_vlm.errors import DataError


def column(raw: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    """The images or videos that a record has in a column of their own."""
    names = [name for name in (kind, f"{kind}s") if not is_empty(raw.get(name))]
    if len(names) > 1:
        raise DataError(f"{where}: both {kind!r} and '{kind}s' are given; give one of them")
    value = raw[names[0]] if names else []
    return list(value) if is_list(value) else [value]


def image_of(source: Any, where: str, keys: Keys) -> Image:
    """An image given as a path, URL, bytes, PIL image, or an object that holds one of them."""
    if isinstance(source, Mapping):  # {"url": ...}, or an undecoded image of `datasets`
        known = {"bytes", "url", "path", "detail"}
        held = keys.read(source, known, where)
        if held.pop("detail", "auto") != "auto":  # OpenAI's resolution
            keys.read({"detail": source["detail"]}, (), where)
        source = next((held[key] for key in ("bytes", "url", "path") if key in held), None)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if not isinstance(source, str | bytes | PIL.Image.Image) or not source:
        raise DataError(
            f"{where}: an image is a path, URL, bytes or PIL image, not {kind_of(source)}"
        )
    return Image(source)


def video_of(source: Any, fps: Any, where: str, keys: Keys) -> Video:
    """A video given as a path, an object that holds one, or a list of frames."""
    if fps is not None and (not isinstance(fps, int | float) or not fps > 0):
        raise DataError(f"{where}: fps is {fps!r}; give frames per second, above 0")
    if isinstance(source, Mapping):
        source = only(keys.read(source, {"path", "url"}, where), ("path", "url"), where)
    if is_list(source):
        frames = tuple(image_of(f, f"{where}, frame {i}", keys) for i, f in enumerate(source))
        if not frames:
            raise DataError(f"{where}: the video has no frames")
        return Video(frames, fps)
    if not isinstance(source, str) or not source:
        raise DataError(f"{where}: a video is a path or a list of frames, not {kind_of(source)}")
    return Video(source, fps)
