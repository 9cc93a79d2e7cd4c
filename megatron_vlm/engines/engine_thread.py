"""Engines next to a trainer: a sampler in an event loop of its own, in a thread of rank 0."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.vllm_process import EngineSettings
from megatron_vlm.engines.vllm_sampler import VllmSampler

T = TypeVar("T")


class Engines:
    """The sampler of rank 0, and the event loop that it runs in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="engines")
        self.thread.start()
        self._sampler: VllmSampler | None = None

    def start(
        self, settings: EngineSettings, gpus: Sequence[str], waiting: Callable[[], None]
    ) -> None:
        """Start an engine on each of `gpus`, such as "6" or "4,5", or a single engine if there are
        no names. `waiting` is called until the engines have loaded."""
        replicas = [{"CUDA_VISIBLE_DEVICES": each} for each in gpus] or [{}]
        starting = VllmSampler.start(settings, replicas)
        self._sampler = result_of(self.submit(starting), waiting)

    @property
    def sampler(self) -> VllmSampler:
        """The sampler, for use inside the event loop only."""
        assert self._sampler is not None, "not started"
        return self._sampler

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End the engines and all tasks of the event loop."""
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
        if self._sampler is not None:
            await self._sampler.close()
        await self.loop.shutdown_default_executor()


def side_by_side(gpus: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's options for engines that run on several GPUs each."""
    parallel = max((each.count(",") + 1 for each in gpus), default=1)
    return {"tensor_parallel_size": parallel} if parallel > 1 else {}
