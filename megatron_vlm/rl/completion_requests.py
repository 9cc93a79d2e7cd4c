"""Queue for the completions of episodes. Most engines get each prompt at once, and an engine that
draws in rounds gets all of them together."""

import asyncio
import hashlib
import sys
from collections.abc import Sequence

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.sampler import Sampler

# Answers by their seeds and the digests of their prompts. Environments say the same after the same
# answers, so an episode that is played again with these is the same episode.
Drawn = dict[tuple[int, str], Completion]
# A seed, and the completion that it draws.
Awaited = tuple[int, asyncio.Future[Completion]]
# A prompt with its settings, the episode that has asked last, and what its seeds draw.
Ready = tuple[Row, SamplingSettings, int, list[Awaited]]


class CompletionQueue:
    """Queue that episodes request completions from. It passes a prompt to the engine as soon as all
    episodes that share it wait for it. With `in_rounds` it waits until every episode in progress
    waits for a completion, and passes their prompts in the order of their seeds. So the batches do
    not depend on how long rewards and environments take. An episode may wait for several.

    Answers that are in `drawn` are not sampled again, and new ones are added."""

    def __init__(
        self,
        sampler: Sampler,
        settings: SamplingSettings,
        in_rounds: bool = False,
        drawn: Drawn | None = None,
    ):
        self.sampler, self.settings, self.in_rounds = sampler, settings, in_rounds
        self.drawn: Drawn = {} if drawn is None else drawn
        self.playing = 0  # number of episodes that have not ended
        self.places = sys.maxsize  # maximum episodes in progress; the others wait for an end
        self.waiting: set[int] = set()  # those that wait for a prompt to be passed on
        self.sharing: dict[int, list[Awaited]] = {}  # prompts that others will ask for, too
        self.ready: list[Ready] = []

    async def leave(self, episode: int) -> None:
        """Remove an episode that has ended, with what it has asked for and nobody draws yet, and
        draw the round that has waited for it alone."""
        self.playing -= 1
        self.waiting.discard(episode)
        for _, _, _, awaited in (each for each in self.ready if each[2] == episode):
            for _, answer in awaited:
                answer.cancel()
        self.ready = [each for each in self.ready if each[2] != episode]
        await self._pass_on()

    async def ask(
        self,
        prompt: Row,
        seed: int,
        sharers: int,
        episode: int,
        settings: SamplingSettings | None = None,
    ) -> Completion:
        """Return the completion that this seed draws. `sharers` is the number of requests that send
        the same prompt, as the same object, with consecutive seeds. `episode`: the number of the
        episode that asks. `settings`: the request's own, if it has some."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sharing = self.sharing.setdefault(id(prompt), [])
        sharing.append((seed, answer))
        self.waiting.add(episode)
        if len(sharing) == sharers:
            del self.sharing[id(prompt)]
            own = settings or self.settings
            self.ready.append((prompt, own, episode, sorted(sharing, key=_seed)))
            await self._pass_on()
        return await answer

    async def _pass_on(self) -> None:
        if self.in_rounds and len(self.waiting) < min(self.playing, self.places):
            return
        ready, self.ready = sorted(self.ready, key=lambda each: _seed(each[3][0])), []
        self.waiting.clear()
        drawing = (self._answer(prompt, own, awaited) for prompt, own, _, awaited in ready)
        await asyncio.gather(*drawing)

    async def _answer(
        self, prompt: Row, settings: SamplingSettings, awaited: Sequence[Awaited]
    ) -> None:
        digest = hashlib.sha256(prompt.ids_S.numpy().tobytes()).hexdigest()
        seeds = [seed for seed, _ in awaited if (seed, digest) not in self.drawn]
        try:
            completions = await self.sampler.sample(prompt, settings, seeds) if seeds else []
        except BaseException as error:
            for _, answer in awaited:
                if not answer.done():
                    answer.set_exception(error)
            return
        self.drawn |= zip(((seed, digest) for seed in seeds), completions, strict=True)
        for seed, answer in awaited:
            if not answer.done():
                answer.set_result(self.drawn[seed, digest])


def _seed(awaited: Awaited) -> int:
    return awaited[0]
