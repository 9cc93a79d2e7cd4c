"""Queues for the completions of episodes. The trainer's own decoder serves requests in lockstep,
and an engine serves each prompt at once."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.sampler import Sampler


class CompletionQueue(Protocol):
    """Queue that episodes request completions from."""

    def enter(self, episodes: int) -> None:
        """Add this number of episodes to those in progress."""

    def leave(self) -> None:
        """Remove an episode that has ended."""

    async def ask(self, prompt: Row, seed: int, sharers: int) -> Completion:
        """Return the completion that this seed draws. `sharers` is the number of episodes that send
        the same prompt, as the same object, with consecutive seeds."""


@dataclass(frozen=True)
class AskedPrompt:
    """Prompt and the seeds of its completions, which are consecutive."""

    prompt: Row
    seeds: list[int]
    answers: "list[asyncio.Future[Completion]]"


class LockstepQueue:
    """Queue that serves all requests together, once every episode in progress waits for a
    completion. So the batches do not depend on how long rewards and environments take."""

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

    def next_prompts_to_answer(self) -> list[AskedPrompt]:
        """Take the pending requests, one per prompt, in the order of seeds."""
        assert len(self.waiting) == self.playing
        self.all_wait.clear()
        by_prompt: dict[int, AskedPrompt] = {}
        for prompt, seed, answer in sorted(self.waiting, key=lambda each: each[1]):
            request = by_prompt.setdefault(id(prompt), AskedPrompt(prompt, [], []))
            request.seeds.append(seed)
            request.answers.append(answer)
        self.waiting = []
        return list(by_prompt.values())


# Answers by their seeds and the digests of their prompts. Environments say the same after the same
# answers, so an episode that is played again with these is the same episode.
Drawn = dict[tuple[int, str], Completion]


class EngineQueue:
    """Queue that passes a prompt to the engine as soon as all episodes that share it wait for
    it. Answers that are in `drawn` are not sampled again, and new ones are added."""

    def __init__(self, sampler: Sampler, settings: SamplingSettings, drawn: Drawn | None = None):
        self.sampler, self.settings = sampler, settings
        self.drawn: Drawn = {} if drawn is None else drawn
        self.waiting: dict[int, list[tuple[int, asyncio.Future[Completion]]]] = {}

    def enter(self, episodes: int) -> None:
        """Do nothing, because episodes do not wait for each other."""

    def leave(self) -> None:
        """Do nothing, because episodes do not wait for each other."""

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
        digest = hashlib.sha256(prompt.ids_S.numpy().tobytes()).hexdigest()
        seeds = [seed for seed, _ in waiting if (seed, digest) not in self.drawn]
        try:
            completions = await self.sampler.sample(prompt, self.settings, seeds) if seeds else []
        except BaseException as error:
            for _, answer in waiting:
                answer.set_exception(error)
            return
        self.drawn |= zip(((seed, digest) for seed in seeds), completions, strict=True)
        for seed, answer in waiting:
            answer.set_result(self.drawn[seed, digest])
