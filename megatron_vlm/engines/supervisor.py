"""Supervision of one engine among several, which is restarted when it has died, and the lock of
their updates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.engines.vllm_process import EngineDiedError, EngineProcess

_log = logging.getLogger(__name__)
DEATHS = 5  # deaths in a row, without an answer in between, until an engine is given up

Start = Callable[[Mapping[str, str]], Awaitable[EngineProcess]]
Renew = Callable[["EngineReplica", EngineProcess], Awaitable[None]]


class EngineReplica:
    """An engine, or the next one while it starts. `start` starts an engine with the replica's
    environment. `renew` gives it the newest weights and puts it into use."""

    def __init__(self, environment: Mapping[str, str], start: Start, renew: Renew):
        self.environment, self.start, self.renew = environment, start, renew
        self.engine: EngineProcess | None = None
        self.in_flight = 0  # number of samples
        self.deaths = 0
        self.given_up: Exception | None = None
        self.mending: asyncio.Task[None] | None = None

    def reset_deaths(self) -> None:
        self.deaths = 0

    def replace_engine(self, engine: EngineProcess, died: EngineDiedError) -> None:
        """Start another engine, once, after this one has died. Many requests may report its
        death."""
        if self.engine is not engine:
            return
        _log.warning("An engine has ended, and is started again. Its last words:\n%s", died)
        engine.close()
        self.engine = None
        self._record_death(died)
        if self.given_up is None:
            self.mending = asyncio.create_task(self._mend())

    def _record_death(self, died: EngineDiedError) -> None:
        self.deaths += 1
        if self.deaths >= DEATHS:
            self.given_up = SamplerError(
                f"it has died {self.deaths} times without an answer in between, and is not "
                f"started again; its last words:\n{died}",
                place="an engine",
            )

    async def _mend(self) -> None:
        while self.given_up is None:
            try:
                engine = await self.start(self.environment)
            except SamplerError as error:
                self._record_death(EngineDiedError(str(error)))
                continue
            except Exception as error:  # a mistake, which another start would not correct
                self.given_up = error
                return
            try:
                await self.renew(self, engine)
                return
            except EngineDiedError as died:
                engine.close()
                self._record_death(died)
            except BaseException as error:
                engine.close()
                if not isinstance(error, Exception):
                    raise
                self.given_up = error

    async def close(self) -> None:
        if self.mending is not None:
            self.mending.cancel()
            with suppress(asyncio.CancelledError):
                await self.mending
        if self.engine is not None:
            self.engine.close()


class UpdateLock:
    """A lock for weight updates, during which no new holder enters."""

    def __init__(self) -> None:
        self.inside = 0
        self.closed = False
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def shared_with_requests(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            await asyncio.shield(self._notify())

    @asynccontextmanager
    async def exclusive(self, interrupt: bool) -> AsyncIterator[None]:
        """Keep new holders away, and wait until all holders have left unless they are to be
        interrupted."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.closed = True
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: interrupt or not self.inside)
            yield
        finally:
            self.closed = False
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
