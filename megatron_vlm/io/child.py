"""A child process that answers numbered requests over a socket, seen from its parent; parent.py is
the other end. All of this runs on one event loop.

Many requests may be in progress. When the child has died, all of them end in a ChildDiedError.
"""

import asyncio
import os
import signal
import socket
import tempfile
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, BinaryIO

from megatron_vlm.io.parent import FRAME_HEADER, Message, head, parse, sizes

_LAST_S = 2.0  # seconds to read the last answers of a child that has ended
OUTPUT_CHARACTERS = 4000  # characters of a child's last output in a message

Unpack = Callable[[Any, bytes], Any]


class ChildDiedError(Exception):
    """Death of a child before it has answered. The text is its last output, where that is kept, or
    describes how it has ended."""

    def __init__(self, ending: str, suspects: int = 0):
        super().__init__(ending)
        # Number of requests that the child was busy with, including this one. It is 0 if this one
        # had not begun.
        self.suspects = suspects


class ChildRefusedError(Exception):
    """Answer of a child that is an error."""

    def __init__(self, error: Any):
        super().__init__(error)
        self.error = error


@dataclass(eq=False)
class ChildCall:
    """A request that was sent."""

    answered: "Future[Any]"
    hear: Callable[[Any], object] | None  # receives the news that come before the answer
    begun: asyncio.Event = field(default_factory=asyncio.Event)


def _with_body(answer: Any, body: bytes) -> Any:
    """Return an answer. If it has raw bytes, it is an object, and they are its "body"."""
    return {**answer, "body": body} if body else answer


@dataclass(eq=False)
class Child:
    """A child from its start to its end."""

    process: asyncio.subprocess.Process
    reader: StreamReader
    writer: StreamWriter
    output: BinaryIO | None
    unpack: Unpack
    calls: dict[int, ChildCall] = field(default_factory=dict)  # pending calls by number
    numbers: "count[int]" = field(default_factory=count)
    following: "asyncio.Task[None] | None" = None
    ended: bool = False
    ending: str = ""  # how it has ended

    @staticmethod
    async def start(
        command: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        keeps_output: bool = False,
        unpack: Unpack = _with_body,
    ) -> "Child":
        """Start a child: the command, the file descriptor of its socket, and the arguments. It
        inherits `files`. `unpack` makes an answer of its JSON and its raw bytes. Without
        `keeps_output`, its output is on this process's standard error."""
        output = tempfile.TemporaryFile() if keeps_output else None  # noqa: SIM115
        local_end, child_end = socket.socketpair()
        try:
            # Before there is a child: asyncio ends one whose start is cancelled, and there is no
            # later await that would leave it running.
            reader, writer = await asyncio.open_unix_connection(sock=local_end)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*command, str(child_end.fileno()), *arguments),
                    pass_fds=(child_end.fileno(), *files),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output or 2,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # no Ctrl-C for it, and its own children end with it
                )
            except BaseException:
                writer.close()
                raise
        except BaseException:
            local_end.close()
            if output is not None:
                output.close()
            raise
        finally:
            child_end.close()
        child = Child(process, reader, writer, output, unpack)
        child.following = asyncio.create_task(child._follow())
        return child

    def call(
        self,
        request: Mapping[str, Any],
        body: Sequence[Any] = (),
        hear: Callable[[Any], object] | None = None,
    ) -> ChildCall:
        """Send a request with the raw bytes of `body`. A cancelled call is aborted in the child."""
        if self.ended:
            raise ChildDiedError(self.ending)
        number = next(self.numbers)
        self.send({"id": number, **request}, body)
        call = self.calls[number] = ChildCall(asyncio.get_running_loop().create_future(), hear)

        def forget(answered: "Future[Any]") -> None:
            del self.calls[number]
            if answered.cancelled():
                self.send({"id": number, "do": "abort"})

        call.answered.add_done_callback(forget)
        return call

    def send(self, message: Message, body: Sequence[Any] = ()) -> None:
        """Send what needs no answer."""
        if not self.ended:  # a thread of the child reads at once, so this needs no drain
            self.writer.write(head(message, sum(memoryview(part).nbytes for part in body)))
            for part in body:
                self.writer.write(part)

    def busy(self) -> int:
        """Return the number of calls that have begun and are not answered."""
        calls = self.calls.values()
        return sum(call.begun.is_set() and not call.answered.done() for call in calls)

    def last_words(self) -> str:
        """Return the end of the output that is kept, or how the child has ended."""
        if self.output is None or self.ended:
            return self.ending
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - OUTPUT_CHARACTERS))
        return self.output.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the child and all processes that it has started."""
        if not self.ended:  # afterwards, other processes may get this number
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the child, and wait until it is gone."""
        self.kill()
        assert self.following is not None
        await asyncio.wait((self.following,))
        if not self.ended:  # the task was cancelled, as all of the loop are at its end
            await self._follow()

    async def _follow(self) -> None:
        """Pass on answers until the child is gone, and then fail all pending calls."""
        listening = asyncio.create_task(self._listen())
        exiting = asyncio.create_task(self.process.wait())
        await asyncio.wait((listening, exiting), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((exiting,), timeout=_LAST_S)  # a child that has closed its socket
        self.kill()
        await asyncio.wait((listening,), timeout=_LAST_S)
        listening.cancel()
        self.ending = self.ending or _describe_exit(await exiting)
        if self.output is not None:
            self.ending = self.last_words() or f"it {self.ending}, without an error message"
            self.output.close()
        self.ended = True
        self.writer.close()
        busy = self.busy()
        for call in self.calls.values():
            if not call.answered.done():
                suspects = busy if call.begun.is_set() else 0
                call.answered.set_exception(ChildDiedError(self.ending, suspects))
                call.begun.set()

    async def _listen(self) -> None:
        read = self.reader.readexactly
        try:
            while True:
                text, body = sizes(await read(FRAME_HEADER.size))
                self._take(parse(await read(text)), await read(body))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the child has closed its socket
        except Exception as error:  # what a child sends is untrusted
            self.ending = f"sent what cannot be read: {type(error).__name__}: {error}"
            self.kill()

    def _take(self, message: Message, body: bytes) -> None:
        call = self.calls.get(message["id"])
        if call is None or call.answered.done():
            return
        if "news" in message:
            call.begun.set()
            if call.hear is not None:
                call.hear(message["news"])
        elif "error" in message:
            call.answered.set_exception(ChildRefusedError(message["error"]))
        else:
            call.answered.set_result(self.unpack(message["answer"], body))


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    why = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{why}"
