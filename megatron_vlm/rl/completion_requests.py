"""Who answers episodes: the trainer's own decoder, round by round, or an engine, each at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.sampler import Sampler
from megatron_vlm.training.completions import Completion, SamplingSettings


class CompletionQueue(Protocol):
    """Where episodes ask for answers."""

    def enter(self, episodes: int) -> None:
        """So many more episodes are under way."""

    def leave(self) -> None:
        """One of them has ended."""

    async def ask(self, prompt: Row, seed: int, sharers: int) -> Completion:
        """The answer that this seed draws. As many episodes as `sharers` ask with the same prompt,
        the same object, and seeds that follow each other."""


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt, and the seeds of its answers, which follow each other."""

    prompt: Row
    seeds: list[int]
    answers: "list[asyncio.Future[Completion]]"


class LockstepQueue:
    """Answers all at once, when every episode that is under way waits for an answer. So what is
    asked together does not depend on how long rewards and environments take."""

    def __init__(self) -> None:
        self.playing = 0
        self.waiting: list[tuple[Row, int, asyncio.Future[Completion]]] = []
        self.all_wait = asyncio.Event()

    def enter(self, episodes: int) -> None:
        self.playing += episodes
        self.all_wait.clear()

    def leave(self) -> None:
        self.playing -= 1
        self._look()

    async def ask(self, prompt: Row, seed: int, sharers: int) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, seed, answer))
        self._look()
        return await answer

    def _look(self) -> None:
        if len(self.waiting) == self.playing:
            self.all_wait.set()

    def taken(self) -> list[AskedPrompt]:
        """What is to be answered now, each prompt once, in the order of seeds."""
        assert len(self.waiting) == self.playing
        self.all_wait.clear()
        found: dict[int, AskedPrompt] = {}
        for prompt, seed, answer in sorted(self.waiting, key=lambda each: each[1]):
            asked = found.setdefault(id(prompt), AskedPrompt(prompt, [], []))
            asked.seeds.append(seed)
            asked.answers.append(answer)
        self.waiting = []
        return list(found.values())


class EngineQueue:
    """Passes each prompt on as soon as all who share it have asked."""

    def __init__(self, sampler: Sampler, settings: SamplingSettings):
        self.sampler, self.settings = sampler, settings
        self.waiting: dict[int, list[tuple[int, asyncio.Future[Completion]]]] = {}

    def enter(self, episodes: int) -> None:
        """Nobody waits for the others."""

    def leave(self) -> None:
        """The same."""

    async def ask(self, prompt: Row, seed: int, sharers: int) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        waiting = self.waiting.setdefault(id(prompt), [])
        waiting.append((seed, answer))
        if len(waiting) == sharers:
            del self.waiting[id(prompt)]
            await self._answer(prompt, waiting)
        return await answer

    async def _answer(
        self, prompt: Row, waiting: "Sequence[tuple[int, asyncio.Future[Completion]]]"
    ) -> None:
        try:
            seeds = [seed for seed, _ in waiting]
            found = await self.sampler.sample(prompt, self.settings, seeds)
        except BaseException as error:
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), completion in zip(waiting, found, strict=True):
            answer.set_result(completion)
