"""Requests of the client and their results, independent of their encoding as bytes; and the
decompression of bodies that arrive compressed by zstd."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import zstandard

from megatron_vlm.errors import MegatronVLMError

MAX_TOKEN_ID = 2**31 - 1  # tokens are sent as int32
NO_TOKEN, NO_LOG_PROB = 0, -99999.0  # an absent entry of a TopK
_LONGEST_NAME = 80  # characters of a name that a message repeats


class RequestError(MegatronVLMError):
    """A request that cannot be done because of a mistake of the client. The error names the
    field."""


def entry(field: str, name: str) -> str:
    """Format an entry of a map for messages, such as `loss_fn_config["beta"]`."""
    short = name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
    return f"{field}[{json.dumps(short)}]"


@dataclass(frozen=True, eq=False)
class Text:
    tokens: np.ndarray  # [n] int32, none negative


@dataclass(frozen=True)
class Picture:
    """An image file that has not been opened yet."""

    data: bytes
    format: str  # png or jpeg
    expected_tokens: int | None = None
    size: tuple[int, int] | None = None  # (width, height) to use instead of its own


Chunk: TypeAlias = Text | Picture


@dataclass(frozen=True, eq=False)
class Datum:
    """The input of the model, and the inputs of its loss."""

    chunks: tuple[Chunk, ...]
    inputs: Mapping[str, np.ndarray]  # [n] or [n, k], float32 or int64; "target_tokens" is required


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    model_id: str
    seq_id: int  # from 1
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float | str]  # options of the loss
    forward_only: bool

    @cached_property
    def size(self) -> int:
        """Bytes of its pictures and arrays. Sparse inputs grow beyond the body."""
        chunks = [chunk for datum in self.data for chunk in datum.chunks]
        arrays = [array for datum in self.data for array in datum.inputs.values()]
        arrays += [chunk.tokens for chunk in chunks if isinstance(chunk, Text)]
        pictures = sum(len(chunk.data) for chunk in chunks if isinstance(chunk, Picture))
        return pictures + sum(array.nbytes for array in arrays)


@dataclass(frozen=True, eq=False)
class TopK:
    """The k most likely tokens at each of n places. Absent entries are NO_TOKEN with
    NO_LOG_PROB."""

    ids: np.ndarray  # [n, k] int32
    log_probs: np.ndarray  # [n, k] float32


@dataclass(frozen=True, eq=False)
class SparseLogProbs:
    """Log-probs of the listed cells of a matrix."""

    values: np.ndarray  # [c] float32
    crow: np.ndarray  # [n + 1] int64
    column: np.ndarray  # [c] int64
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Sampled:
    tokens: np.ndarray  # [n] int32
    log_probs: np.ndarray | None  # [n] float32
    stopped: bool  # by a stop token or text; otherwise it reached the maximum length
    top: TopK | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    sequences: tuple[Sampled, ...]
    prompt_log_probs: np.ndarray | None = None  # [n] float32, NaN where there is none
    top_prompt: TopK | None = None
    target_prompt_log_probs: np.ndarray | SparseLogProbs | None = None  # [n - 1, k] float32


# The largest window that HTTP allows for zstd (RFC 9659). The decompressor would allocate more for
# a frame that requests it.
MAX_WINDOW = 2**23
# Several consecutive frames are allowed. A body of nothing but empty frames is not.
MAX_ZSTD_FRAMES = 1000
# Bytes that are decompressed at once. Four bytes may encode a block of 128 KiB, so these yield at
# most 8 MiB.
_STEP = 256
_PLACE = "the packed body"


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Decompress the zstd frames in `body`. More than `max_bytes` bytes are refused as soon as they
    appear."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    content = bytearray()
    at = frames = 0
    while at < len(body) or not frames:
        frame = decompressor.decompressobj()
        frames += 1
        if frames > MAX_ZSTD_FRAMES:
            raise RequestError(
                f"has more than {MAX_ZSTD_FRAMES} zstd frames",
                place=_PLACE,
                remedy="pack it into one frame",
            )
        while not frame.eof:
            piece = body[at : at + _STEP]
            if not piece:
                raise RequestError(
                    f"is cut off after {len(body)} bytes",
                    place=_PLACE,
                    remedy="send the whole zstd frame",
                )
            try:
                content += frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise RequestError(
                    f"has no zstd frame at byte {at} that can be unpacked ({error})",
                    place=_PLACE,
                    remedy=f"pack it with a window of at most {MAX_WINDOW} bytes, or send it as "
                    "it is",
                ) from error
            if len(content) > max_bytes:
                raise RequestError(
                    f"has {len(body)} bytes that unpack to more than the limit of {max_bytes}",
                    place=_PLACE,
                    remedy="send fewer datums in a request",
                )
            at += len(piece) - len(frame.unused_data)
    return bytes(content)
