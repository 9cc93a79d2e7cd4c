"""An engine without a model, in the trainer's own process: it draws each of its tokens with the
same probability, by the seed and the version. With the option `begun`, the path of a file, its
start creates that file and never ends. `registered` makes the engine known by name alone, as an
installed package would."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.engine_kinds import GROUP, EngineKind, EngineSettings
from megatron_vlm.engines.sampler import Adapter, Capacity, Hear, ProcessedPrompt, Weights
from tests.support import entry_point

IDS = range(20, 60)


class UniformEngine:
    capacity = Capacity(samples=8, scores=8)

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.version = settings, 0

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
        hear: Hear | None = None,
    ) -> list[Completion]:
        return [self._answer(settings.max_tokens, seed) for seed in seeds]

    def _answer(self, count: int, seed: int) -> Completion:
        ids = tuple(Random(seed + self.version).choices(IDS, k=count))
        return Completion(ids, (-math.log(len(IDS)),) * count, "length", ((self.version, count),))

    async def score(self, row: Row, top_k: int, timeout_s: float) -> Tensor:
        table_SJ2 = torch.full((len(row.ids_S), 1 + top_k, 2), -math.log(len(IDS)))
        table_SJ2[:, 0, 0] = row.ids_S.roll(-1)
        return table_SJ2.double()

    async def inspect(self, prompt: Row) -> ProcessedPrompt | None:
        return None

    async def update(self, weights: Weights, version: int, interrupt: bool = False) -> None:
        self.version = version

    async def close(self) -> None:
        self.settings = None


async def _start(settings: EngineSettings) -> UniformEngine:
    if "begun" in settings.options:
        Path(settings.options["begun"]).touch()
        await asyncio.Event().wait()
    return UniformEngine(settings)


UNIFORM = EngineKind(_start, lambda python, key: "uniform 1.0")


def registered(folder: Path) -> AbstractContextManager[None]:
    """Register the engine as `uniform`, by a package in this folder."""
    return entry_point.registered(folder, GROUP, "uniform", f"{__name__}:UNIFORM")
