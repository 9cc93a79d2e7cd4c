"""Requests of rank 0 to the engine: its view of each prompt, and an answer to it."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.commands.agree.agree_settings import AgreeSettings, prompts_of
from megatron_vlm.commands.agree.compare import ComparedPrompt, compare
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_for, engine_of_flags
from megatron_vlm.engines.sampler import Engine
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.run.evaluation.held_out_sets import question_of
from megatron_vlm.training.worker import MegatronWorker

T = TypeVar("T")
_BEAT_S = 5.0  # seconds between two heartbeats while the engine starts, which has its own timeout
_SHARE = 0.4  # share of a GPU's memory for an engine that is on the trainer's GPU


# A prompt and the answer to it, which is None if the ids differed.
AnsweredPrompt = tuple[ComparedPrompt, Completion | None]


@dataclass
class Asking:
    """The prompts and the engine. The steps are, in this order: open, start, update, ask, close."""

    worker: MegatronWorker
    cfg: Config
    settings: AgreeSettings
    dtype: str  # float32 or bfloat16, for engine and trainer
    prompts: list[tuple[str, Row]] = field(default_factory=list)
    answered: list[AnsweredPrompt] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    engine: Engine | None = None

    def open(self) -> None:
        """Choose prompts that are spread over the data."""
        cfg, key = self.cfg, "data.eval" if self.cfg.data.eval else "data.train"
        sizes = self.worker.source.sizes
        data = open_data(prompts_of(cfg), key, cfg.data, cfg.model.path, sizes, train=False)
        assert isinstance(data, DataSet)
        count = sum(map(len, data.indexes))
        places = np.linspace(0, count - 1, min(self.settings.samples, count)).round().astype(int)
        for handle in map(data.handle, places.tolist()):
            self.prompts.append((data.where(handle), question_of(data, handle).prompt))
        self.stop_ids = data.readers[0].encoder.renderer.end_ids

    def start(self) -> None:
        """Start the engine with room for prompts of these sizes."""
        rows = [row for _, row in self.prompts]
        is_cuda = self.worker.platform.is_cuda
        devices = self.settings.devices
        engine = engine_of_flags(
            self.cfg.engine, self.settings.engine, () if devices is None else (devices,)
        )
        settings = EngineSettings.from_config(
            engine,
            str(self.worker.source.path),
            dtype=self.dtype,
            max_len=max(len(row.ids_S) for row in rows) + self.settings.max_tokens,
            pictures=max(1, *(_count(row.image_grid_I3) for row in rows)),
            videos=max(_count(row.video_grid_I3) for row in rows),
            has_media=any(row.has_media for row in rows),
            is_inspected=True,
            reserves_media=is_cuda,
            memory_share=_SHARE if is_cuda and devices is None else None,
        )
        try:
            self.engine = self.runner.run(self._run_with_heartbeat(engine_for(engine, settings)))
        except ConfigError as error:
            if error.key != "engine.name" or not settings.has_media:
                raise
            remedy = "compare on GPUs, or give prompts of text alone"
            raise ConfigError(**error.fields() | {"key": "--engine", "remedy": remedy}) from None

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give the trainer's weights to the engine."""
        assert self.engine is not None
        self.runner.run(self.engine.update(named, 1))

    def ask(self) -> None:
        """Request the answers to all prompts at the same time."""
        self.answered = self.runner.run(self._ask_all())

    async def _ask_all(self) -> list[AnsweredPrompt]:
        tables = PixelTables(str(self.worker.source.path), torch.device("cpu"))
        requests = (
            self._ask_one(seed, where, row, tables)
            for seed, (where, row) in enumerate(self.prompts)
        )
        return list(await asyncio.gather(*requests))

    async def _ask_one(
        self, seed: int, where: str, row: Row, tables: PixelTables
    ) -> AnsweredPrompt:
        assert self.engine is not None
        settings, stop_ids = self.settings, self.stop_ids
        sampling = SamplingSettings(settings.max_tokens, settings.temperature, stop_ids=stop_ids)
        try:
            view = await self.engine.inspect(row)
            assert view is not None, "an engine of one process that was started for it"
            prompt = compare(where, row, view, tables)
            answers = await self.engine.sample(row, sampling, [seed]) if prompt.ids else [None]
        except DataError as error:
            raise DataError(**error.within(where).fields()) from error
        self.worker.watchdog.busy()
        return prompt, answers[0]

    async def _run_with_heartbeat(self, work: Coroutine[Any, Any, T]) -> T:
        async def beat() -> None:
            while True:
                self.worker.watchdog.busy()
                await asyncio.sleep(_BEAT_S)

        beating = asyncio.create_task(beat())
        try:
            return await work
        finally:
            beating.cancel()

    def close(self) -> None:
        """Shut the engine down."""
        if self.engine is not None:
            self.runner.run(self.engine.close())
        self.runner.close()


def _count(grid_I3: Tensor | None) -> int:
    return 0 if grid_I3 is None else len(grid_I3)
