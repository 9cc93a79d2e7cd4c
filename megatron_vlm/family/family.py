"""The definition of a model family: everything about it that the rest of the package asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.family.engine_prompt import EnginePrompt
from megatron_vlm.family.images import ImageReader, VideoReader
from megatron_vlm.family.spec import ModelSizes, TowerChains
from megatron_vlm.family.tiny import TinyParts


@dataclass(frozen=True)
class Family:
    """A model family; each family has one instance. `tower` builds the vision tower with unset
    weights from config.json, a device, the switch for recomputing its blocks in the backward, and
    the chains of its blocks."""

    model_type: str  # as config.json names it
    chat: ChatFormat
    sizes_of: Callable[[PretrainedConfig], ModelSizes]
    tower: Callable[[PretrainedConfig, torch.device, bool, TowerChains], torch.nn.Module]
    # How a checkpoint in this folder sees pictures and videos, with the keys of `data`, or of
    # `data.video`, by which it is set: None is the checkpoint's own value.
    images: Callable[[str | Path, Mapping[str, Any]], ImageReader]
    videos: Callable[[str | Path, Mapping[str, Any]], VideoReader]
    engine_prompt: EnginePrompt
    # Patterns of names (as of fnmatch) of tensors that are not loaded, and that an export copies
    # from the checkpoint that was trained.
    passthrough: tuple[str, ...] = ()
    tiny: TinyParts | None = None  # set for the names of TinySpec.family
    # Patches and grids from what a processor pads: its values, positions, and patches on a token's
    # side. None: the processor returns patches and grids.
    unpad: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
