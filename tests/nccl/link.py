"""The connection of a rank to the referee."""

import contextlib
import json
import os
import socket
import sys
import threading
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.nccl.operation import Operation

_MOST_PLACES, _MOST_LIBRARY_PLACES = 4, 2
_HIDDEN = (
    *("tests.nccl.link", "tests.nccl.operation", "tests.nccl.group", "tests.nccl.install"),
    *("torch.", "contextlib", "functools"),
)


class BrokenRuleError(RuntimeError):
    """The referee's verdict, raised where a rank waits or issues."""


class Link:
    """The connection of one rank of one world."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        if rank == 0:
            store.set("nccl-rules-job", uuid.uuid4().hex)
        self.rank, self.rules = rank, os.environ["NCCL_RULES"].split(",")
        self.verdict: str | None = None
        self.is_leaving, self.has_left = False, threading.Event()
        self.lock = threading.RLock()  # garbage that is collected meanwhile may report
        self.issued = 0
        self.pending: dict[int, Operation] = {}
        self.socket = socket.create_connection(("127.0.0.1", int(os.environ["NCCL_RULES_PORT"])))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send({"job": store.get("nccl-rules-job").decode(), "rank": rank, "world": world})
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, kind: str, **message: Any) -> None:
        self._send({"kind": kind, **message})

    def issue(self, operation: "Operation", comm: str, ranks: list[int]) -> None:
        """Queue an operation. It runs when the referee says so."""
        with self.lock:
            if self.verdict is not None:
                raise BrokenRuleError(self.verdict)
            self.issued += 1
            operation.id = self.issued
            self.pending[operation.id] = operation
        self.tell(
            "issue",
            id=operation.id,
            comm=comm,
            ranks=ranks,
            name=operation.name,
            signature=operation.signature,
            transfers=operation.transfers,
            where=operation.where,
        )

    def leave(self) -> None:
        """End the connection after the referee has read everything."""
        self.is_leaving = True
        self.tell("bye")
        self.has_left.wait()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which ends `_listen`, too
        self.socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError), self.lock:  # `_listen` notices the end of the referee
            self.socket.sendall(line)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for line in self.socket.makefile():
                self._receive(**json.loads(line))
        self._end("the referee is gone")
        self.has_left.set()

    def _receive(
        self, kind: str, id: int = 0, index: int = 0, tag: int = 0, text: str = ""
    ) -> None:
        if kind == "go":
            run = self.pending[id].run
            threading.Thread(target=run, args=(index, tag), daemon=True).start()
        elif kind == "finished":
            self.pending.pop(id).finished.set()
        elif kind == "verdict":
            self._end(text)
        elif kind == "bye":
            self.has_left.set()

    def _end(self, verdict: str) -> None:
        with self.lock:
            self.verdict = self.verdict or verdict
            for operation in self.pending.values():
                operation.finished.set()


def place() -> str:
    """Return the innermost places of the caller, in Megatron and in the program."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < _MOST_PLACES:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        is_library = "/site-packages/" in path
        if not module.startswith(_HIDDEN) and (len(found) < _MOST_LIBRARY_PLACES or not is_library):
            found.append(f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
