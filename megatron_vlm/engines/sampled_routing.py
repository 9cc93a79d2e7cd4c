"""Experts that an engine chose for the tokens of its samples, as they come back from it.

Shapes: S tokens of a prompt and its answer, R those whose experts the engine returns, L layers with
experts, K experts of a token.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import Row


def first_unrouted(prompt: Row) -> int:
    """Return the number of leading tokens whose experts are known from earlier answers."""
    if prompt.routing_SLK is None:
        return 0
    is_known_S = prompt.routing_SLK[:, 0, 0] >= 0
    return int(is_known_S.int().cumprod(0).sum())


def routings_of(answer: Mapping[str, Any], start: int) -> Iterator[Tensor | None]:
    """Yield the experts [S, L, K] of each sample, or None if the engine returns none. They are -1
    for the tokens before `start`, and for the last one, which was drawn and never read."""
    values = torch.from_numpy(np.frombuffer(answer.get("body", b""), np.int16).copy())
    for sample in answer["samples"]:
        if (shape := sample.get("routing")) is None:
            yield None
            continue
        routing_RLK, values = values[: prod(shape)].view(shape), values[prod(shape) :]
        unknown = routing_RLK.new_full((1, *shape[1:]), -1)
        yield torch.cat([unknown.expand(start, -1, -1), routing_RLK, unknown])
