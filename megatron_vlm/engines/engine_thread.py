"""Engines beside a trainer: a sampler in a loop of its own, in a thread of rank 0."""

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
    """On rank 0: the sampler, and the loop that it lives in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="engines")
        self.thread.start()
        self._sampler: VllmSampler | None = None

    def start(
        self, settings: EngineSettings, gpus: Sequence[str], waiting: Callable[[], None]
    ) -> None:
        """Start an engine on each of `gpus`, such as "6" or "4,5"; one where none are named.
        `waiting` is called until they have loaded."""
        replicas = [{"CUDA_VISIBLE_DEVICES": each} for each in gpus] or [{}]
        starting = VllmSampler.start(settings, replicas)
        self._sampler = result_of(self.submit(starting), waiting)

    @property
    def sampler(self) -> VllmSampler:
        """To be used in the loop."""
        assert self._sampler is not None, "not started"
        return self._sampler

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have the loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End them, and whatever the loop still does."""
        self.submit(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _end(self) -> None:
        # First, or what is still asked would be asked again, of an engine that is started for it.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._sampler is not None:
            await self._sampler.close()
        await self.loop.shutdown_default_executor()


def side_by_side(gpus: Sequence[str]) -> dict[str, Any]:
    """vLLM's options for engines on several GPUs each."""
    parallel = max((each.count(",") + 1 for each in gpus), default=1)
    return {"tensor_parallel_size": parallel} if parallel > 1 else {}
