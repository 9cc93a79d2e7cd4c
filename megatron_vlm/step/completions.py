"""What a sampler is asked for, and what it answers."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How an answer is drawn. The defaults draw from what the model itself gives."""

    max_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw among so many of the likeliest tokens; 0: among all
    top_p: float = 1.0  # draw among the likeliest tokens whose probabilities add up to this
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt. Shapes: S its tokens, L decoder layers with experts, K experts of a
    token."""

    ids: tuple[int, ...]  # with the token that ended it, unless its length did
    # Of each id, by the model itself: as at temperature 1, with nothing cut off.
    log_probs: tuple[float, ...]
    ended: Literal["stop", "length"]
    version: int = 0  # of the weights that drew it
    routing_SLK: Tensor | None = None  # the experts that its tokens went to, where asked for
