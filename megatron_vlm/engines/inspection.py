"""What an engine's own processor has made of a prompt.

Shapes: P patches, C values of a patch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EngineMedia:
    """A picture or a video: its grid, and its normalised patches in the type that the model gets
    them in."""

    grid: tuple[int, ...]
    patches_PC: Tensor


@dataclass(frozen=True)
class EngineView:
    """A whole prompt, and the version of the engine."""

    ids: tuple[int, ...]
    images: tuple[EngineMedia, ...]
    videos: tuple[EngineMedia, ...]
    version: str


def seen_of(answer: Mapping[str, Any]) -> EngineView:
    """Of the answer of `inspect` in server/serve.py."""
    start, found = 0, []
    for about in (*answer["image"], *answer["video"]):
        shape, dtype = about["shape"], getattr(torch, about["dtype"])
        end = start + 4 * math.prod(shape)
        values = torch.frombuffer(bytearray(answer["body"][start:end]), dtype=torch.float32)
        found.append(EngineMedia(tuple(about["grid"]), values.view(shape).to(dtype)))
        start = end
    images = len(answer["image"])
    version = f"vLLM {answer['vllm']}"
    return EngineView(tuple(answer["ids"]), tuple(found[:images]), tuple(found[images:]), version)
