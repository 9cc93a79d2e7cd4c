"""vLLM beside the trainer: a loop in a thread of rank 0, and weights for it from all ranks."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from megatron_vlm.data.batch.dataset import DataSet
from megatron_vlm.family.sizes import Part, TensorSpec
from megatron_vlm.hub import folder_of
from megatron_vlm.rl.desk import EngineDesk
from megatron_vlm.sampling import Adapter, EngineSettings, VllmSampler
from megatron_vlm.step.completions import SamplingSettings
from megatron_vlm.worker import MegatronWorker

T = TypeVar("T")
_POLL_S = 0.5


class Engines:
    """On rank 0: the sampler, which lives in a loop of its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="engines")
        self.thread.start()
        self.sampler: VllmSampler | None = None

    def start(self, worker: MegatronWorker, data: DataSet, waiting: Callable[[], None]) -> None:
        """Start the engines as rl.engine says."""
        gpus = [{"CUDA_VISIBLE_DEVICES": each} for each in worker.cfg.rl.engine_gpus] or [{}]
        starting = VllmSampler.start(settings_of(worker, data), gpus)
        self.sampler = self.wait(self.submit(starting), waiting)

    def desk(self, settings: SamplingSettings) -> EngineDesk:
        """For the episodes of one step."""
        assert self.sampler is not None
        return EngineDesk(self.sampler, settings)

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have the loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: "Future[T]", waiting: Callable[[], None]) -> T:
        """Its result; `waiting` is called until then."""
        while True:
            try:
                return work.result(_POLL_S)
            except TimeoutError:
                if work.done():
                    raise
                waiting()

    def close(self) -> None:
        """End them."""
        if self.sampler is not None:
            self.submit(self.sampler.close()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def settings_of(worker: MegatronWorker, data: DataSet) -> EngineSettings:
    """The settings of every engine."""
    cfg, rl = worker.cfg, worker.cfg.rl
    most = max(int(index.images.max()) for index in data.indexes)
    more = 0 if rl.environment is None else rl.turns
    length = cfg.data.max_tokens + rl.max_new_tokens
    if rl.environment is not None:
        length = max(length, rl.max_tokens)
    parallel = max((each.count(",") + 1 for each in rl.engine_gpus), default=1)
    wide = {"tensor_parallel_size": parallel} if parallel > 1 else {}
    return EngineSettings(
        python=str(rl.engine),
        folder=str(folder_of(cfg.model.path)),
        dtype=str(worker.chunks[0].config.params_dtype).removeprefix("torch."),
        max_len=rl.engine_max_len or length,
        pictures=rl.engine_pictures or max(1, most + more),
        videos=rl.engine_videos,
        lora_rank=cfg.lora.rank,
        lora_vision=in_tower(worker.adapted),
        options=wide | rl.engine_options,
    )


def in_tower(weights: Sequence[TensorSpec]) -> bool:
    """Whether some are in the vision tower or its mergers: vLLM serves adapters there only where it
    was told so when it began."""
    return any(weight.part in (Part.vision, Part.merger) for weight in weights)


def renew(worker: MegatronWorker, engines: Engines | None, version: int, folder: Path) -> None:
    """Give the engines the weights of now, tensor by tensor, or the adapter in `folder`. A
    collective; rank 0 has the engines."""
    sampler = engines.sampler if engines is not None else None
    if not worker.cfg.lora.rank:
        named = worker.named_weights()
        if engines is None or sampler is None:
            for _ in named:
                pass
            return
        engines.submit(sampler.update(named, version)).result()
        return
    target = folder / f"adapter-{version}"
    worker.export_hf(str(target), kind="adapter")
    if engines is not None and sampler is not None:
        engines.submit(sampler.update(Adapter(str(target)), version)).result()
        for older in folder.glob("adapter-*"):
            if older != target:
                shutil.rmtree(older)
