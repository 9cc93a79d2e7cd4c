"""Reward process, seen from the trainer, which sends calls to it, kills it if it hangs, and
restarts it if it has ended. All of this runs on the event loop of RewardPool.

Several calls may run in a process when it hangs or dies. The calls that had started are repeated,
each alone, so that the one at fault is known.
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
from megatron_vlm.user_code.load_code import KEYS, TIMEOUT_KEYS
from megatron_vlm.user_code.serialize import MESSAGE_HEADER, deserialize, serialize

_GRACE_S = 3.0  # seconds after a timeout to cancel the coroutine; at most the timeout itself
_START_S = 600.0  # seconds to import a user's file
_LAST_S = 2.0  # seconds to read the last answers of a process that has ended


class RewardCallError(Exception):
    """Error in a user's code. The text is the end of a sentence that begins with the code's name.
    `fields` describe the process's own error, if it has sent one."""

    def __init__(self, text: str, fields: dict[str, Any] | None = None):
        super().__init__(text)
        self.fields = {"problem": text} if fields is None else fields


class RewardProcessDiedError(Exception):
    """Death of the process before it has answered. The text describes how it ended."""

    def __init__(self, ending: str, suspects: int):
        super().__init__(ending)
        # Number of calls that the process was busy with, including this call. It is 0 if this call
        # had not started.
        self.suspects = suspects


@dataclass(eq=False)
class _Call:
    answered: "asyncio.Future[Any]"
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RewardProcess:
    """Process from its start to its end."""

    process: asyncio.subprocess.Process
    reader: StreamReader
    writer: StreamWriter
    timeout_s: float
    timeout_key: str
    calls: dict[int, _Call] = field(default_factory=dict)  # pending calls by number
    numbers: Any = field(default_factory=lambda: count(1))
    following: "asyncio.Task[None] | None" = None
    ended: bool = False

    @staticmethod
    async def start(kind: str, target: str, timeout_s: float) -> "RewardProcess":
        """Return a new process that has loaded the function. Raise ConfigError if it cannot."""
        our_socket, child_socket = socket.socketpair()
        arguments = [str(child_socket.fileno()), str(os.getpid()), kind, target, repr(timeout_s)]
        # -P keeps its own imports from the working folder. -u shows users' prints at once.
        module = ["-u", "-P", "-m", "megatron_vlm.user_code.reward_child"]
        with child_socket:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *module, *arguments),
                pass_fds=(child_socket.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # the trainer's standard output stays free of users' prints
                env=without_job(),
                start_new_session=True,  # no Ctrl-C for it, and its children end with it
            )
        reader, writer = await asyncio.open_unix_connection(sock=our_socket)
        reward_process = RewardProcess(process, reader, writer, timeout_s, TIMEOUT_KEYS[kind])
        loaded = reward_process.calls[0] = _Call(asyncio.get_running_loop().create_future())
        reward_process.following = asyncio.create_task(reward_process._follow())
        try:
            await asyncio.wait_for(loaded.answered, _START_S)
        except BaseException as error:
            await reward_process.end()
            if (config_error := _of_start(error, KEYS[kind], target)) is None:
                raise
            raise config_error from None
        return reward_process

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request. Raise RewardCallError if the user's code is wrong or is
        known to take too long, and RewardProcessDiedError if the process is gone."""
        number = next(self.numbers)
        call = _Call(asyncio.get_running_loop().create_future())
        if self.ended:
            raise RewardProcessDiedError("is gone", 0)
        frame = serialize({"id": number, **request})
        self.calls[number] = call
        self.writer.write(frame)  # a thread of the process reads at once, so this needs no drain
        try:
            await call.begun.wait()
            # The second wait also helps where this process was held up: the first one may then time
            # out before an answer that has arrived is read.
            for seconds in (self.timeout_s, min(self.timeout_s, _GRACE_S)):
                await asyncio.wait((call.answered,), timeout=seconds)
            if not call.answered.done():
                alone = self._busy() == 1
                await self.end()
                if alone and isinstance(call.answered.exception(), RewardProcessDiedError):
                    text = f"took longer than {self.timeout_key}={self.timeout_s:g} seconds"
                    raise RewardCallError(text)
            return await call.answered
        finally:  # also after a cancellation
            self.calls.pop(number, None)
            call.answered.cancel()

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request that needs no answer."""
        if not self.ended:
            self.writer.write(serialize(request))

    async def end(self) -> None:
        """Kill the process and all processes that it has started."""
        self._kill()
        assert self.following is not None
        await asyncio.shield(self.following)

    def _busy(self) -> int:
        """Return the number of calls that have started and are not answered."""
        calls = self.calls.values()
        return sum(call.begun.is_set() and not call.answered.done() for call in calls)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _follow(self) -> None:
        """Pass on answers until the process is gone, and then fail all pending calls."""
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
                suspects = busy if call.begun.is_set() else 0
                lost = RewardProcessDiedError(_describe_exit(status), suspects)
                call.answered.set_exception(lost)
                call.begun.set()

    async def _listen(self) -> None:
        read = self.reader.readexactly
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                text, body = MESSAGE_HEADER.unpack(await read(MESSAGE_HEADER.size))
                self._take(deserialize(await read(text), await read(body)))

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
    """Worker of the pool: its process, which is restarted when needed, and the turns of calls."""

    def __init__(self, kind: str, target: str, timeout_s: float):
        self.kind, self.target, self.timeout_s = kind, target, timeout_s
        self.life: RewardProcess | None = None
        self.episodes = 0  # number of episodes in progress
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._inside = 0  # number of calls that use the process now
        self._alone = 0  # number of calls that use it alone, or wait to do so

    async def alive(self) -> RewardProcess:
        """Return the live process, and start one if there is none."""
        async with self._starting:
            if self.life is None or self.life.ended:
                self.life = await RewardProcess.start(self.kind, self.target, self.timeout_s)
            return self.life

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Hold a turn on the process for a call. With `alone`, no other call has a turn."""
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
        """End the process."""
        async with self._starting:
            if self.life is not None:
                await self.life.end()


def _of_start(error: BaseException, key: str, target: str) -> ConfigError | None:
    """Return the ConfigError for a process that did not start; None for any other error."""
    if isinstance(error, RewardCallError):
        return ConfigError(**error_from_json(error.fields))
    if isinstance(error, RewardProcessDiedError):
        return ConfigError(f": its process {error} while it was imported", key=key, found=target)
    if isinstance(error, TimeoutError):
        return ConfigError(
            f"has not been imported within {_START_S:g} seconds", key=key, found=target
        )
    return None


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    why = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{why}"
