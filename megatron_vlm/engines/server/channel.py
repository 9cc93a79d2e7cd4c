"""The server's end of the socket: what the sampler asks, and the memory that weights come through.

It needs nothing but Python. The process ends with the sampler's, however that ends.
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
    """To be made once, with the two file descriptors that the command line names."""

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
        os._exit(0)  # nobody is left to answer

    def answer(self, number: int, answer: Any, body: bytes = b"") -> None:
        """To the request with this number. Raw bytes come with an object alone."""
        self._send({"id": number, "answer": answer}, body)

    def refuse(self, number: int, error: str) -> None:
        """The same, where it cannot be carried out."""
        self._send({"id": number, "error": error})

    def _send(self, message: Message, body: bytes = b"") -> None:
        self.stream.write(head(message, len(body)))
        self.stream.write(body)
        self.stream.flush()

    def next_tensor(self) -> tuple[Message, bytearray] | None:
        """The next one of an update, {"name", "dtype", "shape"} and its bytes, which come in pieces
        that fit the buffer; None after the last."""
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
    """As megatron_vlm/io/parent_death.py does: also where a fork of the parent keeps the socket
    open."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
