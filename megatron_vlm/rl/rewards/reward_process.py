"""One process of rewards and environments, seen from the trainer: it is asked, timed, ended where
it hangs, and started again where it is gone. All of this runs on the event loop of RewardPool.

Calls that share a process may hang or kill it together. Those that were begun by then are asked
again, each alone, so that the one that is to blame is known.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from megatron_vlm.distributed.error_json import error_from_json
from megatron_vlm.distributed.process import without_job
from megatron_vlm.errors import ConfigError
from megatron_vlm.rl.rewards.serialize import HEADER, deserialize, serialize

_GRACE_S = 3.0  # after its time, for a coroutine to be cancelled; at most as long as its time
_START_S = 600.0  # for a user's file to be imported
_LAST_S = 2.0  # for the last answers of a process that has ended


class RewardCallError(Exception):
    """A user's code is wrong: the end of a sentence that begins with its name. Where the process
    has an error of the whole sentence, its fields."""

    def __init__(self, text: str, fields: dict[str, Any] | None = None):
        super().__init__(text)
        self.fields = {"problem": text} if fields is None else fields


class RewardProcessDiedError(Exception):
    """The process is gone without an answer; says how it ended."""

    def __init__(self, ending: str, suspects: int):
        super().__init__(ending)
        self.suspects = suspects  # calls that it was busy with, this one among them; 0: not this


@dataclass(eq=False)
class _Call:
    answered: "asyncio.Future[Any]"
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RewardProcess:
    """A process from its start to its end."""

    process: asyncio.subprocess.Process
    reader: StreamReader
    writer: StreamWriter
    timeout_s: float
    calls: dict[int, _Call] = field(default_factory=dict)  # that are not answered yet
    numbers: Any = field(default_factory=lambda: count(1))
    following: "asyncio.Task[None] | None" = None
    ended: bool = False

    @staticmethod
    async def start(kind: str, target: str, timeout_s: float) -> "RewardProcess":
        """A new process that has found the function; ConfigError where it has not."""
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(os.getpid()), kind, target, repr(timeout_s)]
        # -P: its own imports are not those of the working folder; -u: what users print appears.
        module = ["-u", "-P", "-m", "megatron_vlm.rl.rewards.reward_child"]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *module,
                *words,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # standard output is the trainer's alone
                env=without_job(),
                start_new_session=True,  # Ctrl-C is ours, and what it starts is ended with it
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        life = RewardProcess(process, reader, writer, timeout_s)
        loaded = life.calls[0] = _Call(asyncio.get_running_loop().create_future())
        life.following = asyncio.create_task(life._follow())
        try:
            await asyncio.wait_for(loaded.answered, _START_S)
        except BaseException as error:
            await life.end()
            if (known := _of_start(error, f"rl.{kind}", target)) is None:
                raise
            raise known from None
        return life

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer. RewardCallError where the user's code is wrong, or known to take too long;
        RewardProcessDiedError where the process is gone."""
        number = next(self.numbers)
        call = _Call(asyncio.get_running_loop().create_future())
        if self.ended:
            raise RewardProcessDiedError("is gone", 0)
        frame = serialize({"id": number, **request})
        self.calls[number] = call
        self.writer.write(frame)  # its thread reads at once, so nothing needs to wait for it
        try:
            await call.begun.wait()
            # Twice: where this process was held up, its clock is ahead of answers that have come.
            for seconds in (self.timeout_s, min(self.timeout_s, _GRACE_S)):
                await asyncio.wait((call.answered,), timeout=seconds)
            if not call.answered.done():
                alone = self._busy() == 1
                await self.end()
                if alone and isinstance(call.answered.exception(), RewardProcessDiedError):
                    raise RewardCallError(f"took longer than rl.timeout={self.timeout_s:g} seconds")
            return await call.answered
        finally:  # it may be cancelled
            self.calls.pop(number, None)
            call.answered.cancel()

    def tell(self, request: Mapping[str, Any]) -> None:
        """What needs no answer."""
        if not self.ended:
            self.writer.write(serialize(request))

    async def end(self) -> None:
        """Kill it, with whatever it has started."""
        self._kill()
        assert self.following is not None
        await asyncio.shield(self.following)

    def _busy(self) -> int:
        """Calls that it has begun and not answered."""
        calls = self.calls.values()
        return sum(call.begun.is_set() and not call.answered.done() for call in calls)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _follow(self) -> None:
        """Hand out answers until the process is gone, then say so to all who wait."""
        listening = asyncio.create_task(self._listen())
        status = await self.process.wait()
        self._kill()
        await asyncio.wait((listening,), timeout=_LAST_S)
        listening.cancel()
        self.ended = True
        self.writer.close()
        busy = self._busy()
        for call in self.calls.values():
            if not call.answered.done():
                lost = RewardProcessDiedError(_ending(status), busy if call.begun.is_set() else 0)
                call.answered.set_exception(lost)
                call.begun.set()

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                text, body = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                self._take(
                    deserialize(
                        await self.reader.readexactly(text), await self.reader.readexactly(body)
                    )
                )

    def _take(self, message: dict[str, Any]) -> None:
        call = self.calls.get(message["id"])
        if call is None or call.answered.done():
            return
        if "begun" in message:
            call.begun.set()
        elif "wrong" in message:
            call.answered.set_exception(RewardCallError(message["wrong"], message.get("fields")))
        else:
            call.answered.set_result(message["answer"])


class RewardWorker:
    """A process that is there whenever it is asked, and whose turn it is to ask it."""

    def __init__(self, kind: str, target: str, timeout_s: float):
        self.kind, self.target, self.timeout_s = kind, target, timeout_s
        self.life: RewardProcess | None = None
        self.episodes = 0  # under way
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._inside = 0  # who ask it now
        self._alone = 0  # who ask it, or wait to ask it, with nobody beside them

    async def alive(self) -> RewardProcess:
        """Its process, which is started where there is none."""
        async with self._starting:
            if self.life is None or self.life.ended:
                self.life = await RewardProcess.start(self.kind, self.target, self.timeout_s)
            return self.life

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Around whoever asks it; `alone`: while nobody else does."""
        async with self._changed:
            self._alone += alone
            await self._changed.wait_for(lambda: not (self._inside if alone else self._alone))
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._alone -= alone
                self._changed.notify_all()

    async def close(self) -> None:
        """End its process."""
        async with self._starting:
            if self.life is not None:
                await self.life.end()


def _of_start(error: BaseException, key: str, target: str) -> ConfigError | None:
    """What keeps a process from starting, as a sentence."""
    if isinstance(error, RewardCallError):
        return ConfigError(**error_from_json(error.fields))
    if isinstance(error, RewardProcessDiedError):
        return ConfigError(f": its process {error} while it was imported", key=key, found=target)
    if isinstance(error, TimeoutError):
        return ConfigError(
            f"has not been imported within {_START_S:g} seconds", key=key, found=target
        )
    return None


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    why = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{why}"
