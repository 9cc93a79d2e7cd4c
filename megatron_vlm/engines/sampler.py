"""The interface of every sampler and of every engine, and a prompt as an engine's own processor has
prepared it, to be compared with the trainer's.

Shapes: P patches, C values of a patch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.completions import Completion, Pieces, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import MegatronVLMError
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


class SamplerError(MegatronVLMError):
    """A failure of a sampler. Its message has the cause and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a Hugging Face checkpoint, such as an export of this package."""

    folder: str


@dataclass(frozen=True)
class Adapter:
    """A folder in PEFT's format. Its weights are added to the base weights, without any earlier
    adapter."""

    folder: str


# The third form has every tensor of a checkpoint under its name there, as
# `MegatronWorker.named_weights` yields them.
Weights = Checkpoint | Adapter | Iterable[tuple[str, Tensor]]


Hear = Callable[[Pieces], None]  # receives tokens while they are drawn


class Sampler(Protocol):
    """A source of answers. Many calls of `sample` may be in progress at a time."""

    async def sample(
        self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample an answer to the prompt for each seed. The same seed gives the same answer. Labels
        are ignored. A prompt may have the experts of its tokens, as far as earlier answers have
        them: an engine that returns experts may leave these out."""

    async def update(self, weights: Weights, version: int, interrupt: bool = False) -> None:
        """Sample with other weights from now on, and put their version into each sample. Later
        requests wait for the new weights. Samples in progress finish with the old weights first.
        With `interrupt` the new weights draw their later tokens, as if they had computed all
        tokens before."""

    async def close(self) -> None:
        """End everything that the sampler started."""


@dataclass(frozen=True)
class Capacity:
    """Numbers of requests that an engine has room for at a time."""

    samples: int  # prompts in progress, more than it draws at a time
    scores: int  # rows that it scores
    adapters: int = 1  # different adapters that prompts in progress may name
    in_rounds: bool = False  # whether it draws the prompts together that come together


class Engine(Sampler, Protocol):
    """A sampler that also scores rows and takes an adapter with a request. Engines are started by
    their names: see engine_kinds.py. Many calls may be in progress at a time."""

    @property
    def capacity(self) -> Capacity: ...

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
        hear: Hear | None = None,
    ) -> list[Completion]:
        """Sample an answer for each seed. `adapter` is used by this request alone. `hear` is called
        with the tokens that follow, often, or never by an engine that cannot tell. A request that
        is cancelled leaves the engine."""

    async def score(self, row: Row, top_k: int, timeout_s: float) -> Tensor:
        """Return the scores of a row's tokens under the engine's first weights, as the worker
        scores them on the ranks: [S, 1 + k, 2] in float64, ids and log-probs of the token and of
        the `top_k` most likely ones, at the position that predicts the token."""

    async def inspect(self, prompt: Row) -> ProcessedPrompt | None:
        """Return the engine's own view of the prompt, or None if it cannot show it."""
