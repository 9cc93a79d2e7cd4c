"""The parent of a child process, seen from the child: its death, which the child must not outlive,
and the socket to it. child.py is the other end.

A frame is a header with two sizes, JSON, and raw bytes. A request is {"id": N, "do": METHOD, ...}.
Its answer is {"id": N, "answer": ...} or {"id": N, "error": ...}. What comes before the answer is
{"id": N, "news": ...}. A child may run in an environment that does not have this package, so this
file needs only Python's standard library.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

FRAME_HEADER = struct.Struct("!IQ")  # bytes of the JSON, bytes of the raw part
MAX_FRAME_BYTES = 1 << 34  # maximum of a frame; anything larger is not a frame of this protocol

Message = dict[str, Any]
Frame = tuple[Message, bytes]


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


def read_frame(stream: BinaryIO) -> Frame | None:
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


class ParentChannel:
    """The channel to the parent. Make it once, with the file descriptor of the command line. One
    thread reads from it, and another one writes to it."""

    def __init__(self, socket_file: int):
        # The end of the socket is not enough: a fork of the parent may keep it open.
        signal_when_parent_dies(signal.SIGKILL)
        os.set_inheritable(socket_file, False)  # this child's own processes must not hold it open
        connection = socket.socket(fileno=socket_file)
        self.stream: BinaryIO = connection.makefile("rwb")  # type: ignore[assignment]

    def listen(self, take: Callable[[Frame], object]) -> None:
        """Pass on every request in a thread of its own. End this process after the last one."""

        def read() -> None:
            try:
                while (frame := read_frame(self.stream)) is not None:
                    take(frame)
            except Exception:
                traceback.print_exc()
            os._exit(0)  # there is no one left to answer

        threading.Thread(target=read, daemon=True).start()

    def answer(self, number: int, answer: Any, body: bytes = b"") -> None:
        """Answer the request with this number."""
        self._send({"id": number, "answer": answer}, body)

    def tell(self, number: int, news: Any = None) -> None:
        """Report that the request of this number has begun, with news of it. An answer follows."""
        self._send({"id": number, "news": news})

    def refuse(self, number: int, error: Any) -> None:
        """Answer the request of this number with an error."""
        self._send({"id": number, "error": error})

    def _send(self, message: Message, body: bytes = b"") -> None:
        self.stream.write(head(message, len(body)))
        self.stream.write(body)
        self.stream.flush()


def signal_when_parent_dies(number: int) -> None:
    """Have Linux send this process a signal as soon as its parent is gone for any reason. Call this
    in the new process, whose parent may be gone already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))
