"""An engine next to a trainer, in an event loop of its own, in a thread of rank 0."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_vlm.config.schema import EngineConfig
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_for
from megatron_vlm.engines.sampler import Engine

T = TypeVar("T")


class EngineThread:
    """The engine of rank 0, and the event loop that it runs in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="engines")
        self.thread.start()
        self._engine: Engine | None = None

    def start(
        self, cfg: EngineConfig, settings: EngineSettings, waiting: Callable[[], None]
    ) -> None:
        """Start the engine that is named. `waiting` is called until it has loaded."""
        self._engine = result_of(self.submit(engine_for(cfg, settings)), waiting)

    @property
    def engine(self) -> Engine:
        """The engine, for use inside the event loop only."""
        assert self._engine is not None, "not started"
        return self._engine

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End the engine and all tasks of the event loop."""
        self.submit(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _end(self) -> None:
        # Cancel the tasks first: a pending request would be retried on an engine that is restarted
        # for it.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
        await self.loop.shutdown_default_executor()
