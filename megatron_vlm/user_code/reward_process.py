"""Reward process, seen from the trainer, which sends calls to it, kills it if it hangs, and
restarts it if it has ended. All of this runs on the event loop of RewardPool.

Several calls may run in a process when it hangs or dies. The calls that had started are repeated,
each alone, so that the one at fault is known.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from megatron_vlm.distributed.error_json import error_from_json
from megatron_vlm.distributed.process import without_job
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.child import Child, ChildDiedError, ChildRefusedError
from megatron_vlm.user_code.load_code import KEYS, TIMEOUT_KEYS
from megatron_vlm.user_code.serialize import deserialize, serialize

_GRACE_S = 3.0  # seconds after a timeout to cancel the coroutine; at most the timeout itself
_START_S = 600.0  # seconds to import a user's file


class RewardCallError(Exception):
    """Error in a user's code. The text ends a sentence that begins with the code's name."""


class RewardWorker:
    """Worker of the pool: its process, which is restarted when needed, and the turns of calls."""

    def __init__(self, kind: str, target: str, timeout_s: float):
        self.kind, self.target, self.timeout_s = kind, target, timeout_s
        self.life: Child | None = None
        self.episodes = 0  # number of episodes in progress
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._inside = 0  # number of calls that use the process now
        self._alone = 0  # number of calls that use it alone, or wait to do so

    async def alive(self) -> Child:
        """Return the live process, and start one if there is none."""
        async with self._starting:
            if self.life is None or self.life.ended:
                self.life = await self._start()
            return self.life

    async def _start(self) -> Child:
        """Return a new process that has loaded the function. Raise ConfigError if it cannot."""
        # -P keeps its own imports from the working folder. -u shows users' prints at once.
        module = [sys.executable, "-u", "-P", "-m", "megatron_vlm.user_code.reward_child"]
        child = await Child.start(module, [str(os.getpid())], without_job(), unpack=deserialize)
        load = {"kind": self.kind, "target": self.target, "timeout_s": self.timeout_s}
        try:
            await asyncio.wait_for(child.call({"do": "load", **load}).answered, _START_S)
        except BaseException as error:
            await child.end()
            if (config_error := _of_start(error, KEYS[self.kind], self.target)) is None:
                raise
            raise config_error from None
        return child

    async def ask(self, life: Child, request: Mapping[str, Any]) -> Any:
        """Return the answer of a process to a request. Raise RewardCallError if the user's code is
        wrong or is known to take too long, and ChildDiedError if the process is gone."""
        message, body = serialize(request)
        call = life.call(message, [body])
        try:
            await call.begun.wait()
            # The second wait also helps where this process was held up: the first one may then time
            # out before an answer that has arrived is read.
            for seconds in (self.timeout_s, min(self.timeout_s, _GRACE_S)):
                await asyncio.wait((call.answered,), timeout=seconds)
            if not call.answered.done():
                alone = life.busy() == 1
                await life.end()
                if alone and isinstance(call.answered.exception(), ChildDiedError):
                    key = TIMEOUT_KEYS[self.kind]
                    raise RewardCallError(f"took longer than {key}={self.timeout_s:g} seconds")
            return await call.answered
        except ChildRefusedError as refused:
            raise RewardCallError(refused.error) from None
        finally:  # also after a cancellation
            call.answered.cancel()

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
    if isinstance(error, ChildRefusedError):
        return ConfigError(**error_from_json(error.error))
    if isinstance(error, ChildDiedError):
        return ConfigError(f": its process {error} while it was imported", key=key, found=target)
    if isinstance(error, TimeoutError):
        return ConfigError(
            f"has not been imported within {_START_S:g} seconds", key=key, found=target
        )
    return None
