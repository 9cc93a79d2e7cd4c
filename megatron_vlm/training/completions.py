"""What a sampler is asked for, and what it answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_vlm.errors import ConfigError

Ended = Literal["stop", "length"]
# The least temperature above 0: logits that are divided by less may overflow, and what is drawn is
# the likeliest token in any case.
COLDEST = 1e-6


@dataclass(frozen=True)
class SamplingSettings:
    """How an answer is drawn. The defaults draw from what the model itself gives."""

    max_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw among so many of the likeliest tokens; 0: among all
    top_p: float = 1.0  # draw among the likeliest tokens whose probabilities add up to this
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    tempered: bool = False  # log-probs are those at this temperature, not at 1

    def __post_init__(self) -> None:
        temperature = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        for name, good, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", temperature, f"0 (greedy), or {COLDEST:g} or above"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or above"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
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
    def picking(self) -> tuple[float, int, float, bool]:
        """What says how the next token is picked, and nothing that says when an answer ends."""
        return self.temperature, self.top_k, self.top_p, self.tempered

    @staticmethod
    def of(said: Mapping[str, Any]) -> "SamplingSettings":
        """From what JSON has made of `dataclasses.asdict`: lists in place of tuples."""
        lists = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
        return SamplingSettings(**{**said, **lists})

    def without_stop(self, ids: Sequence[int]) -> list[int]:
        """An answer's ids without the stop id that ended it. A stop string stays."""
        return list(ids[:-1] if ids[-1] in self.stop_ids else ids)


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt. Shapes: S the tokens of the prompt and its own, L decoder layers with
    experts, K experts of a token."""

    ids: tuple[int, ...]  # with the token that ended it, unless its length did
    # Of each id, by the model itself: as at temperature 1, unless settings say otherwise, with
    # nothing cut off.
    log_probs: tuple[float, ...]
    ended: Ended
    version: int = 0  # of the weights that drew it
    # Where asked for, the experts that the tokens went to, as a Row takes them: -1 for the last,
    # which nothing was drawn after.
    routing_SLK: Tensor | None = None

    def plain(self) -> list[Any]:
        """As JSON can hold it, without the routing."""
        return [self.ids, self.log_probs, self.ended, self.version]

    @staticmethod
    def of(said: Sequence[Any]) -> "Completion":
        """What `plain` has said."""
        ids, log_probs, ended, version = said
        return Completion(tuple(ids), tuple(log_probs), ended, version)
