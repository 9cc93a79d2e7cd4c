"""The sizes of a model: the numbers of its config.json, and every tensor with its shape and part.

Name table, loading, checkpoints, memory estimate, FLOPs and the start-up report all read them here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

TowerInputs = dict[str, Any]


class Part(StrEnum):
    """The parts of a model, as the start-up report lists them."""

    vision = "vision"  # the tower without its mergers
    merger = "merger"  # the projector and the DeepStack projectors
    embed = "embed"
    decoder = "decoder"
    head = "head"

    @property
    def switch(self) -> str:
        """Which of model.freeze_*, optim.*_lr and optim.*_weight_decay governs it."""
        return self.value if self in (Part.vision, Part.merger) else "language"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    part: Part

    @property
    def num_values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ExpertSizes:
    """The experts that some decoder layers have in place of an MLP."""

    count: int
    top_k: int  # of them that each token goes to
    ffn: int  # width of each
    layers: frozenset[int]  # the layers that have some

    def idle_values(self, hidden: int) -> int:
        """Numbers in the weights of the experts that a token does not go to."""
        return len(self.layers) * (self.count - self.top_k) * 3 * self.ffn * hidden


@dataclass(frozen=True)
class TextSizes:
    """The decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]  # frequencies of time, height and width
    pad_id: int | None  # the token whose embedding is used and never learns, if there is one
    experts: ExpertSizes | None = None

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class VisionSizes:
    """The tower."""

    depth: int
    hidden: int
    ffn: int
    out_hidden: int
    patch_values: int  # numbers in one patch: channels x frames x side x side
    merge: int  # side of the square of patches that becomes one token
    deepstack: int  # features beside the merged ones
    # What the tower takes beside the patches of these grids [I, 3], all of it on the host: what
    # stays there, and what its device needs.
    inputs: Callable[[nn.Module, Tensor], tuple[TowerInputs, TowerInputs]] = field(repr=False)

    @property
    def levels(self) -> int:
        """Features of each visual token: the merged ones and one set per DeepStack layer."""
        return 1 + self.deepstack


@dataclass(frozen=True)
class PlaceholderRun:
    """The tokens of one image, or of one frame of a video: [start, start + height * width)."""

    start: int
    height: int
    width: int


@dataclass(frozen=True)
class Tokens:
    """What the ids of a row mean: how many there are, which stand for visual features, and where
    rows that have some are placed."""

    vocab: int  # ids are below: so many rows the embedding has
    image_id: int
    video_id: int
    merge: int  # side of the square of patches that becomes one token
    # Position ids [3, S] of a row from its length and its runs of placeholders.
    positions: Callable[[int, Sequence[PlaceholderRun]], Tensor] = field(repr=False)


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """A whole model. Compared by identity, so that what is counted of it can be kept."""

    text: TextSizes
    vision: VisionSizes
    tokens: Tokens
    tied: bool  # the head shares the embedding's weight
    tensors: tuple[TensorSpec, ...]
    head: TensorSpec  # the head's weight: of a tied model the embedding under another name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the checkpoint, by its Hugging Face name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def num_values(self) -> int:
        """Of all its tensors."""
        return sum(tensor.num_values for tensor in self.tensors)

    @cached_property
    def with_head(self) -> tuple[TensorSpec, ...]:
        """The tensors, and the head's weight also where it is none of them: what may have an
        adapter. That of a tied head leaves the embedding as it is."""
        return (*self.tensors, self.head) if self.tied else self.tensors


# Family: what a model family brings along.

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
