"""Family: what a model family brings along."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_vlm.family.spec import ModelSizes

# Queries, keys and values from what the tower's first linear gives, cos, sin and the number of
# heads.
TowerHeads = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class HFNames:
    """How a checkpoint of the family calls its tensors."""

    language: str  # prefix of the decoder's tensors
    vision: str  # prefix of the tower's tensors
    head: str

    @property
    def embedding(self) -> str:
        return f"{self.language}embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        return f"{self.language}norm.weight"

    def layer(self, number: int) -> str:
        """Prefix of one decoder layer."""
        return f"{self.language}layers.{number}."


@dataclass(frozen=True)
class VisionMarks:
    """The special tokens around and in place of images, as the chat template writes them."""

    start: str
    end: str
    image: str  # stands for one visual token of an image
    video: str


@dataclass(frozen=True)
class Family:
    """One instance per family. `tower` builds the vision tower, with unset weights, from
    config.json: on a device, recomputing its blocks in the backward if asked to, with a function
    that makes the heads of its attention."""

    model_type: str  # as config.json names it
    names: HFNames
    marks: VisionMarks
    sizes_of: Callable[[PretrainedConfig], ModelSizes]
    tower: Callable[[PretrainedConfig, torch.device, bool, TowerHeads], torch.nn.Module]
