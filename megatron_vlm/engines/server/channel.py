"""The server's end of the socket, with the requests of the sampler and the memory for weights.

This file needs only Python's standard library. The process ends with the sampler's process, also
if that is killed.
"""

import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any, BinaryIO

from frames import Message, head, read_frame

Frame = tuple[Message, bytes]


class ParentChannel:
    """The channel to the sampler's process. Make it once, with the two file descriptors of the
    command line."""

    def __init__(self, socket_file: int, buffer_file: int):
        end_with_parent()
        connection = socket.socket(fileno=socket_file)
        self.stream: BinaryIO = connection.makefile("rwb")  # type: ignore[assignment]
        self.buffer = mmap.mmap(buffer_file, 0)
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while (frame := read_frame(self.stream)) is not None:
                self.inbox.put(frame)
        except Exception:
            traceback.print_exc()
        os._exit(0)  # there is no one left to answer

    def answer(self, number: int, answer: Any, body: bytes = b"") -> None:
        """Answer the request with this number. Only an object can have raw bytes."""
        self._send({"id": number, "answer": answer}, body)

    def refuse(self, number: int, error: str) -> None:
        """Answer the request of this number with an error."""
        self._send({"id": number, "error": error})

    def _send(self, message: Message, body: bytes = b"") -> None:
        self.stream.write(head(message, len(body)))
        self.stream.write(body)
        self.stream.flush()

    def next_tensor(self) -> tuple[Message, bytearray] | None:
        """Return the next tensor of an update: {"name", "dtype", "shape"} and its bytes, which
        arrive in pieces that fit the buffer. Return None after the last tensor."""
        message, _ = self.inbox.get()
        if message["do"] == "end":
            self.answer(message["id"], None)
            return None
        values = bytearray(message["bytes"])
        start = 0
        while True:
            end = start + message["piece"]
            values[start:end] = self.buffer[: message["piece"]]
            self.answer(message["id"], None)  # the buffer may be filled again
            if end == len(values):
                return message, values
            start = end
            message, _ = self.inbox.get()


def end_with_parent() -> None:
    """End this process with its parent, as megatron_vlm/io/parent_death.py does. The end of the
    socket is not enough: a fork of the parent may keep it open."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
