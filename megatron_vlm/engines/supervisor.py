"""Supervision of one engine among several, which is restarted when it has died."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.engines.vllm_process import Engine, EngineDiedError

DEATHS = 5  # deaths in a row, without an answer in between, until an engine is given up

Start = Callable[[Mapping[str, str]], Awaitable[Engine]]
Renew = Callable[["EngineReplica", Engine], Awaitable[None]]


class EngineReplica:
    """An engine, or the next one while it starts. `start` starts an engine with the replica's
    environment. `renew` gives it the newest weights and puts it into use."""

    def __init__(self, environment: Mapping[str, str], start: Start, renew: Renew):
        self.environment, self.start, self.renew = environment, start, renew
        self.engine: Engine | None = None
        self.in_flight = 0  # number of samples
        self.deaths = 0
        self.given_up: Exception | None = None
        self.mending: asyncio.Task[None] | None = None

    def reset_deaths(self) -> None:
        self.deaths = 0

    def replace_engine(self, engine: Engine, died: EngineDiedError) -> None:
        """Start another engine, once, after this one has died. Many requests may report its
        death."""
        if self.engine is not engine:
            return
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
