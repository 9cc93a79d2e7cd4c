"""A prompt as an engine's own processor has prepared it.

Shapes: P patches, C values of a patch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ProcessedMedia:
    """A picture or a video: its grid, and its normalised patches in the type that the model
    receives."""

    grid: tuple[int, ...]
    patches_PC: Tensor


@dataclass(frozen=True)
class ProcessedPrompt:
    """A whole prompt as an engine sees it, and the version of the engine."""

    ids: tuple[int, ...]
    images: tuple[ProcessedMedia, ...]
    videos: tuple[ProcessedMedia, ...]
    version: str


def read_processed_prompt(answer: Mapping[str, Any]) -> ProcessedPrompt:
    """Read the answer of `inspect` in server/engine_server.py."""
    start, media = 0, []
    for entry in (*answer["image"], *answer["video"]):
        shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
        end = start + 4 * math.prod(shape)
        values = torch.frombuffer(bytearray(answer["body"][start:end]), dtype=torch.float32)
        media.append(ProcessedMedia(tuple(entry["grid"]), values.view(shape).to(dtype)))
        start = end
    num_images = len(answer["image"])
    version = f"vLLM {answer['vllm']}"
    return ProcessedPrompt(
        tuple(answer["ids"]), tuple(media[:num_images]), tuple(media[num_images:]), version
    )
