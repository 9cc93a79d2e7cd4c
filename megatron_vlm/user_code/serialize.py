"""Messages between the trainer and the reward processes as JSON and raw bytes.

A value that JSON has no form for is an object with a mark. Tuples arrive as lists, paths as text,
and arrays of numpy as lists of numbers. Both ends import this file, so it imports neither torch nor
Megatron.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import PurePath
from typing import Any

import PIL.Image

_MARK = "\0"
# Values from tables that JSON has no form for are sent as text. `datetime` comes before `date`,
# because it is a subclass of it.
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, str, datetime.datetime.fromisoformat),
    "date": (datetime.date, str, datetime.date.fromisoformat),
    "time": (datetime.time, str, datetime.time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "path": (PurePath, str, str),
}
_PICTURE_METADATA = ("exif", "icc_profile", "transparency")  # metadata of a picture that is sent


class PackingError(TypeError):
    """Error for a value that cannot be sent. It names the value."""


def serialize(value: Any) -> tuple[Any, bytes]:
    """Return the JSON and the raw bytes of a value. Raise PackingError if it cannot be sent."""
    body: list[bytes] = []
    return _pack_value(value, body, ""), b"".join(body)


def deserialize(value: Any, body: bytes) -> Any:
    """Return the value from its two parts."""
    return _unpack_value(value, memoryview(body))


def pack_and_unpack(value: Any) -> Any:
    """Return the value as it arrives at the other end."""
    packed, body = serialize(value)
    return deserialize(json.loads(json.dumps(packed)), body)


def _pack_value(value: Any, body: list[bytes], place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _pack_mapping(value, body, place)
    if isinstance(value, list | tuple):
        return [_pack_value(each, body, f"{place}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, bytes | bytearray | memoryview):
        return {_MARK: "bytes", "at": _append(body, bytes(value))}
    if isinstance(value, PIL.Image.Image):
        return _pack_picture(value, body, place)
    for name, (kind, to_text, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {_MARK: name, "text": to_text(value)}
    if isinstance(value, datetime.timedelta):
        return {_MARK: "span", "parts": [value.days, value.seconds, value.microseconds]}
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return _pack_value(value.tolist(), body, place)
    raise PackingError(f"{place.lstrip('.') or 'it'} is of type {type(value).__name__}")


def _pack_mapping(value: Mapping[Any, Any], body: list[bytes], place: str) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _MARK not in value:
        return {key: _pack_value(each, body, f"{place}.{key}") for key, each in value.items()}
    pairs = [
        [_pack_value(key, body, place), _pack_value(each, body, f"{place}.{key}")]
        for key, each in value.items()
    ]
    return {_MARK: "pairs", "pairs": pairs}


def _pack_picture(image: PIL.Image.Image, body: list[bytes], place: str) -> dict[str, Any]:
    try:
        image.load()
    except Exception as error:  # an opened picture may have damaged data
        raise PackingError(f"{place.lstrip('.')} cannot be decoded: {error}") from error
    palette = None if image.palette is None else image.palette.mode
    metadata = {name: image.info[name] for name in _PICTURE_METADATA if name in image.info}
    return {
        _MARK: "picture",
        "mode": image.mode,
        "size": image.size,
        "palette": palette,
        "colours": None if palette is None else image.getpalette(palette),
        "said": _pack_value(metadata, body, "info"),
        "at": _append(body, image.tobytes()),
    }


def _append(body: list[bytes], raw: bytes) -> list[int]:
    start = sum(map(len, body))
    body.append(raw)
    return [start, start + len(raw)]


def _unpack_value(value: Any, body: memoryview) -> Any:
    if isinstance(value, list):
        return [_unpack_value(each, body) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _unpack_value(each, body) for key, each in value.items()}
    if kind == "pairs":
        return {_unpack_value(key, body): _unpack_value(each, body) for key, each in value["pairs"]}
    if kind == "bytes":
        return bytes(body[slice(*value["at"])])
    if kind == "picture":
        return _unpacked_picture(value, body)
    if kind == "span":
        return datetime.timedelta(*value["parts"])
    return _TEXTS[kind][2](value["text"])


def _unpacked_picture(value: Mapping[str, Any], body: memoryview) -> PIL.Image.Image:
    pixels = bytes(body[slice(*value["at"])])
    image = PIL.Image.frombytes(value["mode"], tuple(value["size"]), pixels)
    if value["palette"] is not None:
        image.putpalette(value["colours"], value["palette"])
    image.info.update(_unpack_value(value["said"], body))
    return image
