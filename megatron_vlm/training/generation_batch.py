"""Rows that are generated together: the next token of each, the strings at which an answer ends,
the passes through the pipeline, and the order of prompts.

The prompts go through first (the prefill, where a long prompt takes several passes), and each later
pass takes one token of every row of a batch. A row that has ended makes place for the next prompt
at once. A pass is an ordinary MicroBatch, in decoding with rows of one token.

Shapes: B rows, V the vocabulary, v this rank's part of it with its padding, N ids, T the ranks of
TP, 2 an id and its log-prob."""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.collate import collate, filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.answer_masks import AnswerMasks
from megatron_vlm.data.tokens.completions import (
    Completion,
    Ended,
    GrowingText,
    SamplingSettings,
    TextOf,
)
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.device import to_device
from megatron_vlm.distributed.grid import GroupAxis
from megatron_vlm.errors import DataError
from megatron_vlm.model.kv_cache import KVCache


@dataclass(frozen=True)
class Texts:
    """Decoders of ids into text."""

    plain: TextOf  # without special tokens
    shown: TextOf | None = None  # with special tokens
    special: tuple[str, ...] = ()  # texts of the special tokens
    masks: AnswerMasks | None = None  # for answers that are held to a grammar

    def of(self, string: str) -> TextOf:
        """Return the decoder for the search of a string. If a string contains a special token, it
        can only be found in text that shows special tokens."""
        if self.shown is None or not any(token in string for token in self.special):
            return self.plain
        return self.shown

    def searches(self, strings: Sequence[str]) -> list["StopSearch"]:
        """Return searches that find these strings in an answer."""
        strings_of: dict[TextOf, list[str]] = {}
        for string in strings:
            strings_of.setdefault(self.of(string), []).append(string)
        return [StopSearch(text_of, group) for text_of, group in strings_of.items()]


@dataclass
class StopSearch:
    """A search for strings in an answer that grows by one token at a time. It finds a string at the
    first token at which the text of the whole answer contains one."""

    text_of: TextOf
    strings: Sequence[str]
    growing: GrowingText = field(init=False)

    def __post_init__(self) -> None:
        self.longest = max(map(len, self.strings))
        self.growing = GrowingText(self.text_of)

    def found(self, ids: Sequence[int]) -> bool:
        """Return whether the answer contains a string, now that it has one more token."""
        begin = max(0, len(self.growing.settled) - self.longest)
        text = self.growing.advance(ids)
        return any(text.find(string, begin) >= 0 for string in self.strings)


def whole_logits(logits_Bv: Tensor, vocab: int, tp: GroupAxis) -> Tensor:
    """Gather the logits [B, V] of all TP ranks in fp32, without the padding of the vocabulary."""
    rows, width = logits_Bv.shape
    gathered = logits_Bv.new_empty(tp.size * rows, width)
    dist.all_gather_into_tensor(gathered, logits_Bv.contiguous(), group=tp.group)
    return gathered.view(tp.size, rows, width).transpose(0, 1).flatten(1)[:, :vocab].float()


def pick(
    logits_BV: Tensor,
    settings: SamplingSettings,
    never_N: Tensor,
    turns: Sequence[tuple[int, int]],
    penalised_BV: Tensor | None = None,
    allowed_BV: Tensor | None = None,
) -> Tensor:
    """Pick an id for each row, none of `never_N`. Return it with its log-prob before any cut-off,
    [B, 2] in float64, which holds both exactly. The log-prob is at temperature 1, or with
    settings.tempered at that of the settings. `turns` are the seed of each row and the number of
    its token. `penalised_BV` replaces the logits in the choice, and not in the log-prob, which is
    NaN where no id is allowed."""
    scores_BV = logits_BV if penalised_BV is None else penalised_BV
    scores_BV = scores_BV.index_fill(1, never_N, -torch.inf)
    if allowed_BV is not None:
        scores_BV = scores_BV.masked_fill(~allowed_BV, -torch.inf)
        is_stuck_B = scores_BV.amax(dim=-1).isneginf()
    ids_B = scores_BV.argmax(dim=-1)  # the lowest id among equal logits
    if settings.temperature > 0:
        cuts = settings.top_k, settings.top_p, settings.min_p
        scores_BV = likeliest(scores_BV / settings.temperature, *cuts)
        ids_B = (scores_BV + gumbel(turns, logits_BV)).argmax(dim=-1)
    if settings.tempered and settings.temperature > 0:
        logits_BV = logits_BV / settings.temperature
    log_probs_B = logits_BV.log_softmax(dim=-1).gather(1, ids_B[:, None])[:, 0]
    if allowed_BV is not None:
        log_probs_B = log_probs_B.masked_fill(is_stuck_B, torch.nan)
    return torch.stack([ids_B.double(), log_probs_B.double()], dim=-1)


def likeliest(scores_BV: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Set the scores that do not take part to -inf, as vLLM and transformers do. Those whose
    probability is less than `min_p` times the highest leave first. The `top_k` highest scores
    remain, with all that are equal to the last of them. Among these, the fewest remain whose
    probabilities add up to `top_p`; among equal scores, those with the higher ids remain. At least
    one score remains."""
    if min_p > 0:
        shares_BV = scores_BV.softmax(dim=-1)
        out_BV = shares_BV < min_p * shares_BV.amax(-1, keepdim=True)
        scores_BV = scores_BV.masked_fill(out_BV, -torch.inf)
    if 0 < top_k < scores_BV.shape[1]:
        lowest_B1 = scores_BV.topk(top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < lowest_B1, -torch.inf)
    if top_p < 1:
        rising_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
        out_BV = rising_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        out_BV[:, -1] = False
        scores_BV = scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)
    return scores_BV


def gumbel(turns: Sequence[tuple[int, int]], like_BV: Tensor) -> Tensor:
    """Return noise [B, V]: the id of the largest score with noise is a sample. Each row is drawn
    separately, so that its noise depends on nothing but the row's turn."""
    noise_BV = torch.empty(like_BV.shape, dtype=torch.float64, device=like_BV.device)
    generator = torch.Generator(like_BV.device)
    for row, (seed, token) in enumerate(turns):
        # Similar seeds give similar first numbers, so the seeds are spread by a hash.
        spread = hashlib.blake2b(f"{seed} {token}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(spread, "little") >> 1)
        noise_BV[row].exponential_(generator=generator)
    return noise_BV.log_().neg_().float()


@dataclass
class ActiveSample:
    """An answer that is being generated."""

    prompt: int  # number of its prompt
    settings: SamplingSettings
    seed: int
    position: int  # next position: text continues after the highest position on any axis
    prompt_ids: Tensor  # tokens of its prompt
    searches: list[StopSearch] = field(default_factory=list)  # for its stop strings
    matcher: Any = None  # state of its grammar, on the last stage
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: Ended | None = None
    routing: list[Tensor] = field(default_factory=list)  # experts of each pass, on request

    @property
    def turn(self) -> tuple[int, int]:
        """Seed and token number, which decide the noise of the next token."""
        return self.seed, len(self.ids)

    def penalised(self, logits_V: Tensor) -> Tensor:
        """Return what the next token is chosen by, in vLLM's order: the bias of ids, `min_tokens`,
        and the penalties of tokens that the prompt and the answer have."""
        if not (settings := self.settings).needs_penalties:
            return logits_V
        scores_V = logits_V.clone()

        def ids_of(values: Collection[int]) -> Tensor:
            return to_device(torch.tensor([*values], dtype=torch.long), logits_V.device)

        if bias := dict(settings.logit_bias):
            scores_V[ids_of(bias)] += to_device(torch.tensor([*bias.values()]), logits_V.device)
        if len(self.ids) < settings.min_tokens:
            scores_V[ids_of(settings.stop_ids)] = -torch.inf
        times, factor = Counter(self.ids), settings.repetition_penalty
        drawn, seen_V = ids_of(times), torch.zeros_like(scores_V, dtype=torch.bool)
        seen_V[self.prompt_ids] = seen_V[drawn] = True
        repeated_V = torch.where(scores_V > 0, scores_V / factor, scores_V * factor)
        scores_V = torch.where(seen_V, repeated_V, scores_V)
        scores_V[drawn] -= settings.frequency_penalty * ids_of(times.values())
        scores_V[drawn] -= settings.presence_penalty
        return scores_V

    def end(self) -> Ended | None:
        """Return how the answer ends with its newest token, or None if it continues."""
        if self.ids[-1] in self.settings.stop_ids or math.isnan(self.log_probs[-1]):
            return "stop"
        if any(search.found(self.ids) for search in self.searches):
            return "stop"
        return "length" if len(self.ids) == self.settings.max_tokens else None

    @property
    def completion(self) -> Completion:
        """The answer, after it has ended."""
        assert self.ended is not None
        if math.isnan(self.log_probs[-1]):
            raise DataError(
                f"allows no token after {len(self.ids) - 1}, or needs too much work for one",
                place="the grammar of the answer",
                found=self.settings.grammar,
                remedy="give a simpler one that text can meet",
            )
        routing_SLK = None
        if self.routing:
            last_1LK = torch.full_like(self.routing[-1][:1], -1)
            routing_SLK = torch.cat([*self.routing, last_1LK])
        return Completion(
            tuple(self.ids), tuple(self.log_probs), self.ended, routing_SLK=routing_SLK
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt and its answers, at least one. Several parts take a pass each."""

    parts: Sequence[Row]
    draws: list[ActiveSample]

    @property
    def number(self) -> int:
        return self.draws[0].prompt

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(len(part.tokens_S5) for part in self.parts)

    @property
    def left(self) -> int:
        """Number of answers that have not ended."""
        return sum(draw.ended is None for draw in self.draws)

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(len(draw.ids) for draw in self.draws)


@dataclass(frozen=True)
class DecodePass:
    """A pass through the pipeline, with prompts or with the newest token of each row."""

    batch: MicroBatch
    cache: KVCache
    draws: Sequence[ActiveSample] = ()
    rows: Sequence[int] = ()  # row of the batch that each draw continues
    masks: "Future[Tensor] | None" = None  # where a draw is held to a grammar


@dataclass(frozen=True)
class Prefill:
    """The way of prompts through the pipeline: of one in as many passes as it has parts, or of
    several in one pass. Each prompt has one row, for any number of answers."""

    prompts: Sequence[Prompt]
    left: deque[Sequence[Row]]  # rows of the passes to come
    cache: KVCache

    @staticmethod
    def of(prompts: Sequence[Prompt], device: torch.device) -> "Prefill":
        """Return the prefill of these prompts."""
        passes = zip(*(prompt.parts for prompt in prompts), strict=True)
        return Prefill(prompts, deque(passes), KVCache([], device))

    def next_pass(self) -> DecodePass:
        """Return the next pass. The last one draws the first tokens."""
        batch = collate(self.left.popleft(), range(len(self.prompts)))
        self.cache.extend(batch.lengths)
        if self.left:
            return DecodePass(batch, self.cache)
        pairs = [(row, draw) for row, prompt in enumerate(self.prompts) for draw in prompt.draws]
        draws, rows = [draw for _, draw in pairs], [row for row, _ in pairs]
        return DecodePass(batch, self.cache, draws, rows)


class GenerationBatch:
    """Batch of at most `size` rows that take each pass together. As many batches as stages are in
    progress: while the last stage works on one, the first can start the next. A pass has at most
    `prefill_tokens` of prompts, padded, unless one has more and cannot be divided."""

    def __init__(self, size: int, device: torch.device, prefill_tokens: int | None = None):
        self.size, self.device, self.prefill_tokens = size, device, prefill_tokens
        self.draws: list[ActiveSample] = []  # one for each row
        self.cache = KVCache([], device)
        # `begun` caches prompts after their prefill. Draws in `unseated` continue them, but have no
        # row yet.
        self.begun = KVCache([], device)
        self.unseated: list[tuple[int, ActiveSample]] = []
        self.prefill: Prefill | None = None  # has passes to come

    def passes(self, waiting: deque[Prompt]) -> list[DecodePass]:
        """Return the next passes: a token of each row, and prompts for the free rows."""
        self._seat()
        passes = []
        if self.draws:
            self.cache.advance()
            rows = range(len(self.draws))
            passes.append(DecodePass(_newest_tokens(self.draws), self.cache, self.draws, rows))
        if self.prefill is None and (prompts := self._next_prompts(waiting)):
            self.prefill = Prefill.of(prompts, self.device)
        if self.prefill is not None:
            passes.append(self.prefill.next_pass())
        return passes

    def _next_prompts(self, waiting: deque[Prompt]) -> list[Prompt]:
        prompts, free, longest = list[Prompt](), self.size - len(self.draws), 0
        while waiting and free > 0:
            longest = max(longest, waiting[0].length)
            tokens = (len(prompts) + 1) * longest
            if prompts and self.prefill_tokens is not None and tokens > self.prefill_tokens:
                break
            prompts.append(waiting.popleft())
            free -= len(prompts[-1].draws)
        return prompts

    def settle(self, done: DecodePass, report: Callable[[ActiveSample], None]) -> None:
        """Finish a pass whose draws have their next tokens. Those that have not ended continue."""
        for draw in done.draws:
            report(draw)
            draw.ended = draw.end()
        unfinished = [place for place, draw in enumerate(done.draws) if draw.ended is None]
        if done.cache is self.cache:
            self._keep(unfinished)
        elif self.prefill is not None and not self.prefill.left:
            self.prefill, self.begun = None, done.cache
            self.unseated = [(done.rows[place], done.draws[place]) for place in unfinished]

    def leave(self, prompts: Collection[int]) -> None:
        """Drop the answers to these prompts, between two passes."""
        self._keep([row for row, draw in enumerate(self.draws) if draw.prompt not in prompts])
        self.unseated = [pair for pair in self.unseated if pair[1].prompt not in prompts]
        if not self.unseated:
            self.begun = KVCache([], self.device)
        if self.prefill is not None and self.prefill.prompts[0].number in prompts:
            self.prefill = None

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


def filler(device: torch.device) -> DecodePass:
    """Return a pass that belongs to no prompt."""
    batch = filler_batch()
    return DecodePass(batch, KVCache(batch.lengths, device))


def _newest_tokens(draws: Sequence[ActiveSample]) -> MicroBatch:
    tokens_B5 = torch.tensor(
        [[draw.ids[-1], IGNORE, *[draw.position + len(draw.ids) - 1] * 3] for draw in draws],
        dtype=torch.int32,
    )
    return MicroBatch(
        tokens_B5[:, None], (1,) * len(draws), tuple((n, 0) for n in range(len(draws)))
    )


def _closed_up(rows: Sequence[int]) -> list[int]:
    """Return these rows without gaps. Few rows change their place: the last ones fill the gaps."""
    last = [row for row in rows if row >= len(rows)]
    remaining = set(rows)
    return [place if place in remaining else last.pop() for place in range(len(rows))]
