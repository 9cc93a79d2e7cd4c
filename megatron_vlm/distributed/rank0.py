"""Commands from rank 0: it alone has contact with the outside, and all ranks follow it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron_vlm.distributed.agreement import Signals, Stopped, Vote, all_reduce_max
from megatron_vlm.distributed.collectives import broadcast_bytes, broadcast_json
from megatron_vlm.distributed.watchdog import Watchdog

HEARTBEAT_S = 2.0  # interval of rank 0's messages to the others while it only waits


class Content(Protocol):
    """A large argument of a command, such as a batch of rows."""

    def to_bytes(self) -> bytes: ...

    @staticmethod
    def from_bytes(buffer: bytes) -> "Content": ...


class CommandChannel:
    """Channel of commands from rank 0, on every rank. A command is the name of a method and its
    arguments, which are values of JSON or of the type `content`. `run` runs it on each rank.

    All ranks meet before each command, so that none is taken for stuck. After a signal to one, the
    next meeting raises Stopped on all, once: rank 0 may have more commands before it ends."""

    def __init__(
        self,
        watchdog: Watchdog,
        signals: Signals,
        run: Callable[[str, list[Any]], Any],
        content: type[Content],
        unreachable: Callable[[str, Exception], Exception] | None = None,
    ):
        """`unreachable` returns the error to raise where the others cannot receive a command."""
        self.watchdog, self.signals = watchdog, signals
        self.run, self.content, self.unreachable = run, content, unreachable
        self.alone = dist.get_world_size() == 1
        self.is_stopping = False
        self.last = time.monotonic()

    # -- rank 0

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method on all ranks, and return the result of rank 0."""
        self.send(method, *arguments)
        return self.run(method, list(arguments))

    def send(self, method: str, *arguments: Any) -> None:
        """Send a command that only the others run. `end` is the last; its contents are bytes."""
        plain, packed = list(arguments), {}
        for place, each in enumerate(arguments):
            if isinstance(each, bytes | self.content) and not self.alone:
                # This happens before the other ranks wait, so an error concerns rank 0 alone.
                packed[place] = each if isinstance(each, bytes) else each.to_bytes()
                plain[place] = None
        try:
            self._meet()
            if not self.alone:
                command = {"method": method, "arguments": plain, "contents": [*packed]}
                broadcast_json(command, 0)
                for content in packed.values():
                    broadcast_bytes(content, 0)
        except Exception as error:
            if self.unreachable is None or isinstance(error, Stopped):
                raise
            raise self.unreachable(method, error) from error

    def wait(self) -> None:
        """Keep the other ranks connected while rank 0 does something else; call it often. Raise
        Stopped once a rank has received a signal to stop."""
        is_signal_new = self.signals.received is not None and not self.is_stopping
        if is_signal_new or time.monotonic() - self.last >= HEARTBEAT_S:
            self.send("wait")

    # -- the others

    def follow(self) -> list[Any]:
        """Run the commands of rank 0 until it sends `end`, and return the arguments of that."""
        while True:
            self._meet()
            command = broadcast_json(None, 0)
            method, arguments = command["method"], command["arguments"]
            for place in command["contents"]:
                data = broadcast_bytes(None, 0)
                arguments[place] = data if method == "end" else self.content.from_bytes(data)
            if method == "end":
                return arguments
            if method != "wait":
                self.run(method, arguments)

    def _meet(self) -> None:
        self.last = time.monotonic()
        self.watchdog.alive()
        vote = Vote.OK if self.signals.received is None else Vote.STOP
        if all_reduce_max(vote) == Vote.STOP and not self.is_stopping:
            self.is_stopping = True
            raise Stopped


T = TypeVar("T")
SIGNAL_POLL_S = 0.5


def result_of(
    work: "Future[T]", meanwhile: Callable[[], None], every_s: float = SIGNAL_POLL_S
) -> T:
    """Return the result of long work that the other ranks do not share. `meanwhile` keeps contact
    with them, because they would take rank 0 for stuck."""
    while True:
        try:
            return work.result(every_s)
        except TimeoutError:
            if work.done():  # either the work raised it, or the work has just ended
                return work.result()
            meanwhile()


def run_in_thread(
    work: Callable[[], T], meanwhile: Callable[[], None], every_s: float = SIGNAL_POLL_S
) -> T:
    """Run `work` in a thread and return its result. After an error of `meanwhile` the work is
    abandoned: the process is about to end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="beside").start()
    return result_of(future, meanwhile, every_s)
