"""What the client asks for and what it is answered, whatever bytes it travels as."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from megatron_vlm.errors import MegatronVLMError

MOST_TOKEN = 2**31 - 1  # tokens travel as int32
NO_TOKEN, NO_LOG_PROB = 0, -99999.0  # of an absent entry of a TopK
_LONGEST_NAME = 80  # that a message repeats


class RequestError(MegatronVLMError):
    """A request that cannot be done: a mistake of the client. Names the field."""


def entry(field: str, name: str) -> str:
    """Name an entry of a map as messages write it, such as `loss_fn_config["beta"]`."""
    short = name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
    return f"{field}[{json.dumps(short)}]"


@dataclass(frozen=True, eq=False)
class Text:
    tokens: np.ndarray  # [n] int32, none negative


@dataclass(frozen=True)
class Picture:
    """An image file, which nobody has opened yet."""

    data: bytes
    format: str  # png or jpeg
    expected_tokens: int | None = None
    size: tuple[int, int] | None = None  # (width, height) to take it for, whatever its own are


Chunk: TypeAlias = Text | Picture


@dataclass(frozen=True, eq=False)
class Datum:
    """What the model sees, and what the loss takes of it."""

    chunks: tuple[Chunk, ...]
    inputs: Mapping[str, np.ndarray]  # [n] or [n, k], float32 or int64; "target_tokens" is there


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    model_id: str
    seq_id: int  # from 1
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float | str]  # of the loss
    forward_only: bool


@dataclass(frozen=True, eq=False)
class TopK:
    """The k likeliest tokens at each of n places; absent ones are NO_TOKEN with NO_LOG_PROB."""

    ids: np.ndarray  # [n, k] int32
    log_probs: np.ndarray  # [n, k] float32


@dataclass(frozen=True, eq=False)
class SparseLogProbs:
    """Those of the listed cells of a matrix."""

    values: np.ndarray  # [c] float32
    crow: np.ndarray  # [n + 1] int64
    column: np.ndarray  # [c] int64
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Sampled:
    tokens: np.ndarray  # [n] int32
    log_probs: np.ndarray | None  # [n] float32
    stopped: bool  # by a stop token or text; otherwise it was as long as it might be
    top: TopK | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    sequences: tuple[Sampled, ...]
    prompt_log_probs: np.ndarray | None = None  # [n] float32, NaN where there is none
    top_prompt: TopK | None = None
    target_prompt_log_probs: np.ndarray | SparseLogProbs | None = None  # [n - 1, k] float32
