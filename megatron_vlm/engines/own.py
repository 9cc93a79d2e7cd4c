"""The ranks' own decoder as an engine: `engine.name=own`. Its prompts are drawn on all ranks, with
the weights in training, by training/generate.py, while their first rank waits for the answers."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.sampler import Adapter, Capacity, Hear, ProcessedPrompt, Weights


@dataclass(frozen=True, eq=False)
class AskedPrompt:
    """Prompt and the seeds of its completions, which are consecutive."""

    prompt: Row
    settings: SamplingSettings
    seeds: Sequence[int]


# Draws prompts together on all ranks, once the thread that leads them waits for answers.
Draw = Callable[[Sequence[AskedPrompt]], "Future[list[list[Completion]]]"]


class OwnEngine:
    """Engine that draws in rounds: prompts of the same turn of the event loop are drawn together,
    in their order."""

    capacity = Capacity(samples=2**20, scores=0, in_rounds=True)  # a round takes all prompts

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.asked: list[AskedPrompt] = []  # prompts of the next round
        self.drawing: asyncio.Task[list[list[Completion]]]  # the next round

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
        hear: Hear | None = None,
    ) -> list[Completion]:
        assert adapter is None, "the ranks draw with the weights in training"
        if not self.asked:  # tasks that are ready by now run before this one
            self.drawing = asyncio.create_task(self._draw())
        place, drawing = len(self.asked), self.drawing
        self.asked.append(AskedPrompt(prompt, settings, seeds))
        return (await asyncio.shield(drawing))[place]

    async def _draw(self) -> list[list[Completion]]:
        asked, self.asked = self.asked, []
        return await asyncio.wrap_future(self.draw(asked))

    async def update(self, weights: Weights, version: int, interrupt: bool = False) -> None:
        """Do nothing: the ranks have the weights already."""

    async def score(self, row: Row, top_k: int, timeout_s: float) -> Tensor:
        raise AssertionError("the ranks score their rows by the worker")

    async def inspect(self, prompt: Row) -> ProcessedPrompt | None:
        return None

    async def close(self) -> None:
        """Do nothing: the ranks go on without the engine."""
