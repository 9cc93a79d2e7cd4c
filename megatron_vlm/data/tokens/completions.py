"""Completion of a prompt, the settings by which it is sampled, and its text while it grows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

from torch import Tensor

from megatron_vlm.errors import ConfigError

Ended = Literal["stop", "length"]
# Tokens of answers that are being drawn. For each answer: the number of tokens that were told
# before, and a list of those that follow.
Pieces: TypeAlias = list[list[Any]]
# Lower temperatures above 0 are refused: logits that are divided by them may overflow, and the
# sample is the most likely token in any case.
COLDEST = 1e-6


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for the sampling of an answer, by default from the model's own distribution."""

    max_tokens: int
    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # sample among this number of most likely tokens; 0: among all
    top_p: float = 1.0  # sample among the most likely tokens whose probabilities add up to this
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    tempered: bool = False  # log-probs are those at this temperature, not at 1
    # What follows changes the distribution as vLLM does, by engines with `has_penalties`.
    min_p: float = 0.0  # sample among tokens with at least this share of the highest probability
    presence_penalty: float = 0.0  # taken from the logit of each token that the answer has
    frequency_penalty: float = 0.0  # the same, once for each time that the answer has it
    repetition_penalty: float = 1.0  # divides positive logits of all tokens so far
    logit_bias: tuple[tuple[int, float], ...] = ()  # ids, and what is added to their logits
    min_tokens: int = 0  # number of tokens before which no stop id is sampled
    # What answers are held to, by engines with `has_grammars`: json, choice, regex or grammar, and
    # its text, as vLLM names and reads them.
    grammar: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        temperature = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        for name, good, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", temperature, f"0 (greedy), or {COLDEST:g} or above"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or above"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("min_tokens", not (self.min_tokens and self.stop_strings), "0 with stop strings"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"),
        ):
            if not good:
                raise ConfigError(
                    place="sampling", key=name, found=getattr(self, name), allowed=allowed
                )
        if "" in self.stop_strings:
            raise ConfigError(
                "has an empty string, at which every answer would end",
                place="sampling",
                key="stop_strings",
                found=self.stop_strings,
                remedy="leave it out",
            )

    @property
    def picking(self) -> tuple[float, int, float, float, bool]:
        """Settings that decide the next token by its score, without those that decide the end of
        an answer."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.tempered

    @property
    def needs_penalties(self) -> bool:
        """True if the score of a token is not its logit, or depends on the tokens before it."""
        added = self.presence_penalty, self.frequency_penalty, self.min_tokens, self.logit_bias
        return any(added) or self.repetition_penalty != 1

    @property
    def needs_texts(self) -> bool:
        """True if the decoder needs a tokenizer."""
        return bool(self.stop_strings) or self.grammar is not None

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "SamplingSettings":
        """Build settings from `dataclasses.asdict` after JSON, which has lists for tuples."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        lists["logit_bias"] = tuple(map(tuple, fields["logit_bias"]))
        return SamplingSettings(**{**fields, **lists})

    def without_stop(self, ids: Sequence[int]) -> list[int]:
        """Return an answer's ids without the stop id that ended it. A stop string stays."""
        return list(ids[:-1] if ids[-1] in self.stop_ids else ids)


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt. Shapes: S its tokens with the prompt's, L layers with K experts
    each."""

    ids: tuple[int, ...]  # with the token that ended it, unless its length did
    # The model's own log-prob of each id, without any cut-off: at temperature 1, unless the
    # settings are tempered.
    log_probs: tuple[float, ...]
    ended: Ended
    # Versions of the weights that sampled it, in order, each with its number of tokens: more than
    # one if an update has interrupted it.
    versions: tuple[tuple[int, int], ...] = ()
    # On request, the experts of the tokens, as a Row takes them. The last token has -1, because
    # nothing was sampled after it.
    routing_SLK: Tensor | None = None
    # Numbers of rounds in which the model accepted 0, 1, ... of the tokens that its head had
    # drafted; empty without drafts.
    accepted: tuple[int, ...] = ()

    def as_json(self) -> list[Any]:
        """Return the answer in a form that JSON can hold, without the routing."""
        drafts = [self.accepted] if self.accepted else []
        return [self.ids, self.log_probs, self.ended, self.versions, *drafts]

    @staticmethod
    def from_json(values: Sequence[Any]) -> "Completion":
        """Build an answer from the form of `as_json`."""
        ids, log_probs, ended, versions, *drafts = values
        spans, accepted = tuple(map(tuple, versions)), tuple(*drafts)
        return Completion(tuple(ids), tuple(log_probs), ended, spans, accepted=accepted)


def accepted_drafts(histograms: Iterable[Sequence[int]]) -> tuple[int, list[float]]:
    """Return the number of rounds in which a head has drafted tokens, and the shares of the rounds
    that accepted the first, the second, ... of them. Histograms: see `Completion.accepted`."""
    counts = [sum(same) for same in zip_longest(*histograms, fillvalue=0)]
    return sum(counts), [sum(counts[at:]) / sum(counts) for at in range(1, len(counts))]


TextOf = Callable[[Sequence[int]], str]

# This many characters at the beginning of a tail may differ from the whole answer's: the
# first bytes of a character may be in earlier tokens, and a decoder may drop a leading space.
SEAM = 8
WINDOW = 16  # tokens of a tail


@dataclass
class GrowingText:
    """The text of an answer that grows.

    Only a tail of the answer is decoded. The text of a token may depend on those before it. So a
    tail begins only where its text was the same as the end of all decoded text, with room for an
    incomplete character and for the seam. Otherwise more is decoded.
    """

    text_of: TextOf
    settled: str = field(default="", init=False)  # text before the tail, without its seam
    start: int = field(default=0, init=False)  # first token of the tail
    window: int = field(default=WINDOW, init=False)

    def advance(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, now that it has more tokens."""
        tail = self.text_of(ids[self.start :])
        text = self.settled + (tail[SEAM:] if self.start else tail)
        if len(ids) - self.start >= 2 * self.window:
            self._settle(ids, text)
        return text

    def _settle(self, ids: Sequence[int], text: str) -> None:
        start = len(ids) - self.window
        shown = self.text_of(ids[start:])[SEAM:]
        # Later tokens may still change the last character.
        if len(shown) >= SEAM and text.endswith(shown):
            self.settled, self.start = text[: len(text) - len(shown)], start
            self.window = WINDOW
        else:
            self.window *= 2
