"""Frames between the sampler and its engines: a header with two sizes, JSON, and raw bytes.

Both ends import this file, so it needs only Python's standard library.
"""

import json
import struct
from typing import Any, BinaryIO

FRAME_HEADER = struct.Struct("!IQ")  # bytes of the JSON, bytes of the raw part
MAX_FRAME_BYTES = 1 << 34  # maximum of a frame; anything larger is not a frame of this protocol

Message = dict[str, Any]


class WireError(Exception):
    """An invalid or incomplete frame."""


def head(message: Message, body_bytes: int = 0) -> bytes:
    """Return a frame without its raw bytes."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return FRAME_HEADER.pack(len(text), body_bytes) + text


def sizes(header: bytes) -> tuple[int, int]:
    """Return the sizes of a frame's JSON and of its raw bytes."""
    text, body = FRAME_HEADER.unpack(header)
    if text + body > MAX_FRAME_BYTES:
        raise WireError(
            f"a frame of {text} + {body} bytes; at most {MAX_FRAME_BYTES} are one of ours"
        )
    return text, body


def parse(text: bytes) -> Message:
    """Parse a frame's JSON, which is an object."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise WireError(f"a frame without JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"a frame whose JSON is a {type(message).__name__}, not an object")
    return message


def read_frame(stream: BinaryIO) -> tuple[Message, bytes] | None:
    """Read the next frame of a blocking stream. Return None if the other end has closed it."""
    header = stream.read(FRAME_HEADER.size)
    if not header:
        return None
    text_bytes, body_bytes = sizes(_check_complete(header, FRAME_HEADER.size))
    message = parse(_check_complete(stream.read(text_bytes), text_bytes))
    return message, _check_complete(stream.read(body_bytes), body_bytes)


def _check_complete(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise WireError(f"a frame was cut off: {len(data)} of {size} bytes")
    return data
