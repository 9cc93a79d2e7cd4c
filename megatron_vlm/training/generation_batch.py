"""Rows that are answered together: who shares a pass through the pipeline, and who comes next.

The prompts go through the pipeline once (the prefill); after that each pass takes one token of
every row of a lane. A row that has ended makes place for the next prompt at once. A pass is a
MicroBatch like any other, its rows one token long.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch, collate, filler_batch
from megatron_vlm.data.tokens.row import IGNORE, PlacedRow
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.training.completions import Completion, Ended, SamplingSettings
from megatron_vlm.training.stop_strings import StopSearch


@dataclass
class ActiveSample:
    """An answer in the making."""

    prompt: int  # the number of its prompt
    settings: SamplingSettings
    seed: int
    position: int  # of its next token: text continues after the highest position on any axis
    searches: list[StopSearch] = field(default_factory=list)  # for its stop strings
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: Ended | None = None
    routing: list[Tensor] = field(default_factory=list)  # of each pass that was asked for it

    @property
    def turn(self) -> tuple[int, int]:
        """What the noise of its next token is drawn from."""
        return self.seed, len(self.ids)

    def end(self) -> Ended | None:
        """How it has ended with its newest token, if it has."""
        if self.ids[-1] in self.settings.stop_ids:
            return "stop"
        if any(search.found(self.ids) for search in self.searches):
            return "stop"
        return "length" if len(self.ids) == self.settings.max_tokens else None

    @property
    def completion(self) -> Completion:
        """The answer, which has ended."""
        assert self.ended is not None
        routing_SLK = None
        if self.routing:
            last_1LK = torch.full_like(self.routing[-1][:1], -1)
            routing_SLK = torch.cat([*self.routing, last_1LK])
        return Completion(
            tuple(self.ids), tuple(self.log_probs), self.ended, routing_SLK=routing_SLK
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt and the answers that are drawn to it, one or more."""

    row: PlacedRow
    draws: list[ActiveSample]

    @property
    def number(self) -> int:
        return self.draws[0].prompt

    @property
    def left(self) -> int:
        """Answers that have not ended."""
        return sum(draw.ended is None for draw in self.draws)

    @property
    def tokens(self) -> int:
        """Of all answers, so far."""
        return sum(len(draw.ids) for draw in self.draws)


@dataclass(frozen=True)
class DecodePass:
    """What goes through the pipeline at once: prompts, or the newest token of each row."""

    batch: MicroBatch
    cache: KVCache
    draws: Sequence[ActiveSample] = ()
    rows: Sequence[int] = ()  # which row of the batch each draw continues


class GenerationBatch:
    """At most `size` rows that take each pass together. As many lanes as there are pipeline stages
    are under way: while the last stage works on one, the first can take up the next."""

    def __init__(self, size: int, device: torch.device):
        self.size, self.device = size, device
        self.draws: list[ActiveSample] = []  # of each row
        self.cache = KVCache([], device)
        # Prompts that were taken up, and the draws that continue their rows but have no row yet.
        self.begun = KVCache([], device)
        self.unseated: list[tuple[int, ActiveSample]] = []

    def passes(self, waiting: deque[Prompt]) -> list[DecodePass]:
        """What this lane sends through the pipeline next: a token of each row, and prompts for the
        rows that are free."""
        self._seat()
        found = []
        if self.draws:
            self.cache.advance()
            rows = range(len(self.draws))
            found.append(DecodePass(_newest(self.draws), self.cache, self.draws, rows))
        prompts, free = [], self.size - len(self.draws)
        while waiting and free > 0:
            prompts.append(waiting.popleft())
            free -= len(prompts[-1].draws)
        if prompts:
            found.append(prefill(prompts, self.device))
        return found

    def settle(self, done: DecodePass, heard: Callable[[ActiveSample], None]) -> None:
        """A pass is through, and its draws have their next tokens: go on with those that have not
        ended."""
        for draw in done.draws:
            heard(draw)
            draw.ended = draw.end()
        going_on = [place for place, draw in enumerate(done.draws) if draw.ended is None]
        if done.cache is self.cache:
            self._keep(going_on)
        else:
            self.begun = done.cache
            self.unseated = [(done.rows[place], done.draws[place]) for place in going_on]

    def leave(self, prompts: Collection[int]) -> None:
        """Between two passes: go on without the answers to these prompts."""
        self._keep([row for row, draw in enumerate(self.draws) if draw.prompt not in prompts])
        self.unseated = [pair for pair in self.unseated if pair[1].prompt not in prompts]
        if not self.unseated:
            self.begun = KVCache([], self.device)

    def _keep(self, rows: Sequence[int]) -> None:
        order = _closed_up(rows)
        self.cache.keep(order)
        self.draws = [self.draws[place] for place in order]

    def _seat(self) -> None:
        free = self.size - len(self.draws)
        seated, self.unseated = self.unseated[:free], self.unseated[free:]
        if seated:
            rows, draws = zip(*seated, strict=True)
            self.cache.add(self.begun, rows, spent=not self.unseated)
            self.draws = [*self.draws, *draws]


def prefill(prompts: Sequence[Prompt], device: torch.device) -> DecodePass:
    """The pass of these prompts, each in one row, however many answers are drawn to it."""
    batch = collate([prompt.row for prompt in prompts], range(len(prompts)))
    pairs = [(row, draw) for row, prompt in enumerate(prompts) for draw in prompt.draws]
    draws, rows = [draw for _, draw in pairs], [row for row, _ in pairs]
    return DecodePass(batch, KVCache(batch.lengths, device), draws, rows)


def filler(device: torch.device) -> DecodePass:
    """A pass of nobody."""
    batch = filler_batch()
    return DecodePass(batch, KVCache(batch.lengths, device))


def _newest(draws: Sequence[ActiveSample]) -> MicroBatch:
    tokens_B5 = torch.tensor(
        [[draw.ids[-1], IGNORE, *[draw.position + len(draw.ids) - 1] * 3] for draw in draws],
        dtype=torch.int32,
    )
    return MicroBatch(tokens_B5[:, None], (1,) * len(draws), tuple(range(len(draws))))


def _closed_up(rows: Sequence[int]) -> list[int]:
    """These rows without gaps, of which few change their place: the last ones fill the gaps."""
    last = [row for row in rows if row >= len(rows)]
    kept = set(rows)
    return [place if place in kept else last.pop() for place in range(len(rows))]
