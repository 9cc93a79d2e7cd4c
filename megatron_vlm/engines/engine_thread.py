"""An engine next to a trainer, in an event loop of its own, in a thread of rank 0, and the scores
of rows that it computes there."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megatron_vlm.config.schema import EngineConfig
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_for
from megatron_vlm.engines.sampler import Engine, describe_difference
from megatron_vlm.errors import MegatronVLMError

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


_TIMEOUT_S = 600.0  # maximum seconds in which an engine scores a row


@dataclass
class EngineScorer:
    """Engines that score rows under their first weights, after a check that they see a picture as
    the trainer does. `waiting` is called while this process waits for them."""

    engines: EngineThread
    trainer: Path  # checkpoint whose processor the trainer has
    error_of: Callable[[str], MegatronVLMError]  # makes the error about engines that see another
    waiting: Callable[[], None]
    is_checked: bool = field(default=False, init=False)

    def start(self, row: Row, top_k: int) -> "Future[Tensor]":
        """Begin to score a row: see Engine.score. Refuse engines whose own processor makes other
        patches of the first row with pictures. Engines that show no patches are not checked."""
        engine = self.engines.engine
        if row.has_media and not self.is_checked:
            self.is_checked = True
            view = result_of(self.engines.submit(engine.inspect(row)), self.waiting)
            if view and (what := describe_difference(row, view, self.trainer)):
                raise self.error_of(f": {view.version} makes {what} of a picture")
        return self.engines.submit(engine.score(row, top_k, _TIMEOUT_S))

    def result(self, scores: "Future[Tensor]") -> Tensor:
        """Return the scores of a row that `start` has sent."""
        return result_of(scores, self.waiting)
