"""The server's end of the socket, with the requests of the sampler and the memory for weights.

This file needs only Python's standard library. The process ends with the sampler's process, also
if that is killed.
"""

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import wait
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
        self.buffer_file = buffer_file
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

    def tell(self, number: int, pieces: Any) -> None:
        """Send tokens of the request of this number, which will be answered later."""
        self._send({"id": number, "pieces": pieces})

    def refuse(self, number: int, error: str) -> None:
        """Answer the request of this number with an error."""
        self._send({"id": number, "error": error})

    def _send(self, message: Message, body: bytes = b"") -> None:
        self.stream.write(head(message, len(body)))
        self.stream.write(body)
        self.stream.flush()


def end_with_parent() -> None:
    """End this process with its parent, as megatron_vlm/io/parent_death.py does. The end of the
    socket is not enough: a fork of the parent may keep it open."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))


def end_with_workers(workers: list[Any]) -> None:
    """End this process as soon as one of its own processes has died, and say which one. They are
    vLLM's handles of its workers."""

    def watch() -> None:
        ended = wait([each.proc.sentinel for each in workers])
        for each in workers:
            if each.proc.sentinel in ended:
                print(f"{each.proc.name} (process {each.proc.pid}) has ended, so this engine ends")
        sys.stdout.flush()
        os._exit(1)

    if workers:
        threading.Thread(target=watch, daemon=True).start()
