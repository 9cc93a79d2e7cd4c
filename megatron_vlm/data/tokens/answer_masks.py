"""Masks of the tokens with which answers may continue that are held to a grammar, by llguidance.

Shapes: N draws, W words of 32 tokens each, V the vocabulary."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.tokens.completions import SamplingSettings

MATCHERS = 32  # maximum number of grammars that are kept compiled
THREADS = 4  # threads that compute the masks of a pass


class HeldDraw(Protocol):
    """An answer that grows. It keeps the state of its grammar."""

    settings: SamplingSettings
    ids: list[int]
    matcher: Any


class AnswerMasks:
    """Maker of masks with a tokenizer. It works in a thread, while the ranks compute."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int):
        self.tokenizer, self.vocab = tokenizer, vocab
        self.pool = ThreadPoolExecutor(1, "masks")
        self.compiled = lru_cache(MATCHERS)(self._compile)

    def begin(self, draws: Sequence[HeldDraw]) -> "Future[Tensor]":
        """Begin the masks [N, W] of the draws' next tokens. Each draw comes once for each token."""
        return self.pool.submit(self._masks, draws)

    def _masks(self, draws: Sequence[HeldDraw]) -> Tensor:
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        masks_NW = allocate_token_bitmask(len(draws), self._tokenizer.vocab_size)
        held = []
        for place, draw in enumerate(draws):
            if draw.settings.grammar is None:
                continue
            if draw.matcher is None:
                draw.matcher = self.compiled(draw.settings.grammar).deep_copy()
            else:
                draw.matcher.consume_token(draw.ids[-1])
            held.append((draw.matcher, place))
        fill_next_token_bitmask_par(self._executor, held, masks_NW)
        for matcher, place in held:
            if matcher.is_error():  # no token may follow
                masks_NW[place] = 0
            else:
                stop_ids = draws[place].settings.stop_ids
                self._mask_ends(masks_NW[place].view(np.uint32), stop_ids, matcher.is_accepting())
        return torch.from_numpy(masks_NW)

    def _mask_ends(self, mask_W: np.ndarray, stop_ids: Sequence[int], may_end: bool) -> None:
        """Allow the stop ids alone to end an answer, and only where its grammar is complete."""
        for token in {*self._tokenizer.eos_tokens, *stop_ids}:
            if not 0 <= token < self.vocab:
                continue
            word, bit = token // 32, np.uint32(1 << token % 32)
            mask_W[word] &= ~bit
            if may_end and token in stop_ids:
                mask_W[word] |= bit

    def _compile(self, grammar: tuple[Any, str]) -> Any:
        from llguidance import LLMatcher, grammar_from

        return LLMatcher(self._tokenizer, grammar_from(*grammar), log_level=0)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self.tokenizer, max(self.vocab, len(self.tokenizer)))

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(THREADS)


def unpack_masks(masks_NW: Tensor, vocab: int) -> Tensor:
    """Return masks [N, V] with a boolean for each token."""
    bits = torch.arange(32, dtype=torch.int32, device=masks_NW.device)
    return (masks_NW[:, :, None] >> bits & 1).bool().flatten(1)[:, :vocab]
