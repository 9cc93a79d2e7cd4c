"""A prompt as an engine's own processor has prepared it, and its comparison with the trainer's.

Shapes: P patches, C values of a patch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.family.engine_prompt import EnginePrompt


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


def read_processed_prompt(
    answer: Mapping[str, Any], prompts: EnginePrompt, merge: int
) -> ProcessedPrompt:
    """Read the answer of `inspect` in server/engine_server.py. `merge`: the side of the square of
    patches that becomes a token."""
    start, media = 0, []
    for entry in (*answer["image"], *answer["video"]):
        shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
        end = start + 4 * math.prod(shape)
        values = torch.frombuffer(bytearray(answer["body"][start:end]), dtype=torch.float32)
        patches = values.view(shape).to(dtype)
        media.append(ProcessedMedia(*prompts.unfold(patches, entry["grid"], merge)))
        start = end
    num_images = len(answer["image"])
    version = f"vLLM {answer['vllm']}"
    return ProcessedPrompt(
        tuple(answer["ids"]), tuple(media[:num_images]), tuple(media[num_images:]), version
    )


def compare_media(prompt: Row, view: ProcessedPrompt, tables: PixelTables) -> tuple[bool, float]:
    """Return whether the grids of trainer and engine are equal, and the largest difference of their
    patches; 0 without patches."""
    images = zip_longest(_seen_media(prompt, tables, "image"), view.images)
    videos = zip_longest(_seen_media(prompt, tables, "video"), view.videos)
    pairs = [*images, *videos]
    grids = all(a is not None and b is not None and a.grid == b.grid for a, b in pairs)
    patches = [patch_difference(a, b) for a, b in pairs]
    return grids, float(np.max(patches)) if patches else 0.0


def describe_difference(prompt: Row, view: ProcessedPrompt, folder: str | Path) -> str:
    """Return in words what the engine makes of the pictures of a prompt, if it is not what the
    trainer makes of them with the settings in `folder`; else an empty text."""
    tables = PixelTables(str(folder), torch.device("cpu"))
    grids, difference = compare_media(prompt, view, tables)
    if grids and difference < tables.half_step:
        return ""
    return f"patches that differ by {difference:.2g}" if grids else "other grids"


def patch_difference(
    trainer_media: ProcessedMedia | None, engine_media: ProcessedMedia | None
) -> float:
    """Return the largest difference between the patches of two pictures, in the engine's type; inf
    if their shapes differ."""
    if (
        trainer_media is None
        or engine_media is None
        or trainer_media.patches_PC.shape != engine_media.patches_PC.shape
    ):
        return math.inf
    our_patches_PC = trainer_media.patches_PC.to(engine_media.patches_PC.dtype).float()
    return float((our_patches_PC - engine_media.patches_PC.float()).abs().max())


def _seen_media(prompt: Row, tables: PixelTables, kind: str) -> list[ProcessedMedia]:
    """Return the pictures or videos of a row as the trainer's vision tower gets them."""
    grid_I3, values_PC = prompt.image_grid_I3, tables.images(prompt.pixel_values_PC)
    if kind == "video":
        grid_I3 = prompt.video_grid_I3
        values_PC = tables.videos(prompt.pixel_values_videos_PC)
    if grid_I3 is None or values_PC is None:
        return []
    grids = [tuple(map(int, grid)) for grid in grid_I3.tolist()]
    parts = values_PC.split([math.prod(grid) for grid in grids])
    return [ProcessedMedia(grid, part) for grid, part in zip(grids, parts, strict=True)]
