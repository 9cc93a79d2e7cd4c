"""The prompts of a model family for vLLM, whose processors replace a placeholder of a picture or a
video by all of its tokens.

Shapes: P patches, C values of a patch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.spec import PlaceholderRun, Tokens
from megatron_vlm.family.video_plan import Grid


@dataclass(frozen=True)
class Folded:
    """A prompt as vLLM takes it, and for each video the time of each temporal patch, in the unit of
    `video_facts`."""

    ids: list[int]
    times: list[list[int]]


def _as_processed(patches_PC: Tensor, grid: list[int], merge: int) -> tuple[Grid, Tensor]:
    t, h, w = grid
    return (t, h, w), patches_PC


@dataclass(frozen=True)
class EnginePrompt:
    """Prompts of a family for vLLM's processors, and what these return."""

    # Folds ids with these runs of placeholders, in order, with a run for each frame that a token
    # sees; then come the number of such frames of each video, and the decoder of tokens.
    fold: Callable[
        [list[int], Sequence[PlaceholderRun], Sequence[int], Tokens, Callable[[list[int]], str]],
        Folded,
    ]
    # vLLM's facts about a video, from the times of its temporal patches and the number of frames.
    video_facts: Callable[[list[int], int], dict[str, Any]]
    processor: Mapping[str, Any]  # options with which pictures stay as the trainer resized them
    # For an image and a video, the names of the patches and of the grid, as the processor has them.
    names: Mapping[str, tuple[str, str]]
    tower: str  # name of the tower in vLLM's model
    # The grid and the patches [P, C] of our rows from those that vLLM's processor returns, and the
    # side of the square of patches that becomes a token.
    unfold: Callable[[Tensor, list[int], int], tuple[Grid, Tensor]] = _as_processed
    # More EngineArgs, from the checkpoint's own settings for pictures.
    args: Callable[[ImageReader], dict[str, Any]] = lambda images: {}
    fault_on_cpu: str | None = None  # why vLLM on a CPU may get no pictures; None: it may
    fault_of_adapters: str | None = None  # why vLLM's own server may get none; our engines may
