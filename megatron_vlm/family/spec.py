"""Sizes of a model: the numbers of its config.json, and every tensor with its shape and part.

The name table, loading, checkpoints, the memory estimate, FLOPs and the start-up report read them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import (
    Attention,
    DenseMLP,
    Experts,
    FullAttention,
    GatedDeltaNet,
    LayerSpec,
    MtpHeadSpec,
)


class Part(StrEnum):
    """The parts of a model, as the start-up report lists them."""

    vision = "vision"  # the tower without its mergers
    merger = "merger"  # the projector and the DeepStack projectors
    embed = "embed"
    decoder = "decoder"
    head = "head"
    score = "score"  # the scalar head of a reward model
    mtp = "mtp"  # the MTP head, where it is trained

    @property
    def switch(self) -> str:
        """Suffix of model.freeze_*, and prefix of optim.*_lr, that governs the part."""
        return self.value if self in (Part.vision, Part.merger) else "language"


# The head of a reward model, under the name that it has in transformers.
SCORE = "score.weight"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    part: Part
    lora_group: str | None = None  # its group among the LoRA targets, if it can have an adapter
    learns: bool = True  # False: it always stays as it was loaded
    is_table: bool = False  # its rows are looked up and not multiplied: positions of the tower

    @property
    def num_values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TextSizes:
    """Sizes of the decoder."""

    hidden: int
    layers: tuple[LayerSpec, ...]
    vocab: int
    max_positions: int
    norm_eps: float
    pad_id: int | None  # the token whose embedding is used and never learns, if there is one
    centered_norms: bool = False  # norms multiply by 1 + weight
    embed_scale: float | None = None  # factor of the embeddings of tokens, in their dtype
    logit_cap: float | None = None  # logits are cap * tanh(logits / cap)

    def __post_init__(self) -> None:
        """Refuse combinations that no family has yet, for which model/fused_ops.py would compute
        the norms of queries and keys, or their rotation, in another way than asked for."""
        for each in self.attentions:
            if isinstance(each, FullAttention):
                assert each.gated == self.centered_norms, "norms are centered where it is gated"
                assert each.gated or each.rotary.dim == each.head_dim, "otherwise heads rotate"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The different kinds of attention, in the order of their first layer."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(dict.fromkeys(each for each in mixers if isinstance(each, Attention)))

    @cached_property
    def delta_net(self) -> GatedDeltaNet | None:
        """The gated delta net of the layers that have one: it is the same in all of them."""
        return next((x.mixer for x in self.layers if isinstance(x.mixer, GatedDeltaNet)), None)

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of the layers that have them: they are the same in all of them."""
        return next((x.ffn for x in self.layers if isinstance(x.ffn, Experts)), None)

    @property
    def ends_at_places(self) -> bool:
        """True if the last layer's feed-forward network is applied to supervised tokens alone,
        which are all that the head reads. Experts need all tokens for the losses of their
        router."""
        return self.experts is None

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(n for n, x in enumerate(self.layers) if isinstance(x.ffn, Experts))

    @cached_property
    def divided_by_tp(self) -> dict[str, int]:
        """Counts that TP must divide, by their fields in config.json."""
        counts: dict[str, int] = {}
        for layer in self.kinds:
            counts |= layer.mixer.divided_by_tp | layer.ffn.divided_by_tp
        return counts

    @cached_property
    def dense_width(self) -> int:
        """Width of the MLP of layers without experts, or of the experts if all layers have them."""
        widths = {isinstance(layer.ffn, DenseMLP): layer.ffn.width for layer in self.layers}
        return widths.get(True, widths.get(False, 0))

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The different kinds of layers, in the order of their first layer."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """The place of each layer's kind among `kinds`."""
        return tuple(map(self.kinds.index, self.layers))


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the vision tower."""

    depth: int
    hidden: int
    query: int  # width of all query heads together
    head_dim: int
    ffn: int
    out_hidden: int
    patch_values: int  # numbers in one patch: channels x frames x side x side
    megapixel: int  # patches of a picture of 1024 x 1024
    merge: int  # side of the square of patches that becomes one token
    deepstack: int  # features in addition to the merged ones
    # Values that autograd keeps per patch of a block, and of all mergers.
    block_values: int
    merger_values: int
    # What the tower reads of each patch of these grids [I, 3] beside its values, by name [P, ...].
    patch_inputs: Callable[[Tensor], dict[str, Tensor]] = field(repr=False, compare=False)
    fp32_values: int = 0  # as block_values, those that are in fp32 in any precision

    def token_pairs(self, patches: int, patch_pairs: int) -> int:
        """Return the pairs of a visual token and a later one of its image or frame, from the
        patches and the pairs of patches within each."""
        return max(0, patch_pairs // self.merge**4 - patches // self.merge**2) // 2

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
    """The meaning of a row's ids: their number, the ids that stand for visual features, and the
    positions of rows that have such ids."""

    vocab: int  # rows of the embedding; every id is lower
    image_id: int
    video_id: int
    merge: int  # side of the square of patches that becomes one token
    # Position ids [3, S] of a row from its length and its runs of placeholders.
    positions: Callable[[int, Sequence[PlaceholderRun]], Tensor] = field(repr=False)
    audio_id: int | None = None  # in families with models that hear
    # Values of a patch that the tower reads, and the largest one of any picture, if it is known.
    patch_values: int | None = None
    largest_pixel: float = float("inf")

    @property
    def placeholders(self) -> list[int]:
        """The ids that are never generated: such a token would have no image, video or sound."""
        audio = [] if self.audio_id is None else [self.audio_id]
        return [self.image_id, self.video_id, *audio]


@dataclass(frozen=True)
class HFNames:
    """Names of the tensors in a checkpoint of the family."""

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
        """Return the prefix of a decoder layer."""
        return f"{self.language}layers.{number}."


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """The sizes of a whole model. They compare by identity, so that results can be cached."""

    text: TextSizes
    vision: VisionSizes
    tokens: Tokens
    tied: bool  # the head shares the embedding's weight
    tensors: tuple[TensorSpec, ...]
    head: TensorSpec  # the head's weight; if tied, the embedding under another name
    names: HFNames
    # Shapes of some tensors that are passed through (`Family.passthrough`), where a checkpoint has
    # them.
    passthrough: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    mtp: MtpHeadSpec | None = None  # the MTP head that a checkpoint may have
    trains_mtp: bool = False  # its tensors are among the model's

    @staticmethod
    def from_parts(
        text: TextSizes,
        vision: VisionSizes,
        tokens: Tokens,
        tied: bool,
        tower: Iterable[TensorSpec],
        names: HFNames,
    ) -> "ModelSizes":
        """Make the sizes of a model from its tower's tensors and its text model's."""
        head = TensorSpec(names.head, (text.vocab, text.hidden), Part.head, "head")
        tensors = (*tower, *text_tensors(text, names), *(() if tied else (head,)))
        return ModelSizes(text, vision, tokens, tied, tensors, head, names)

    def with_extra_head(self, kind: str | None, path: str) -> "ModelSizes":
        """Return the sizes of the model at `path` with one more head: `score` or `mtp`."""
        if kind == Part.score:
            return self.with_score()
        return self.with_mtp(path) if kind == Part.mtp else self

    def with_mtp(self, path: str) -> "ModelSizes":
        """Return the sizes of the model at `path` with its MTP head, which is trained."""
        if self.mtp is None:
            raise lacks_mtp_head(path)
        added = (
            TensorSpec(self.mtp.prefix + tensor.name, tensor.shape, Part.mtp)
            for param in self.mtp.params(self.text.hidden)
            for tensor in param.tensors
        )
        tensors = (*self.tensors, *added)
        return replace(self, tensors=tensors, passthrough={}, trains_mtp=True)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the checkpoint, by its Hugging Face name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def num_values(self) -> int:
        """Number of values in all tensors."""
        return sum(tensor.num_values for tensor in self.tensors)

    @cached_property
    def with_head(self) -> tuple[TensorSpec, ...]:
        """The tensors, and the head's weight even if it is tied: every tensor that may have an
        adapter. The adapter of a tied head leaves the embedding as it is."""
        return (*self.tensors, self.head) if self.tied and not self.has_score else self.tensors

    @property
    def has_score(self) -> bool:
        """True for a reward model, which has a scalar head."""
        return self.tensors[-1].part is Part.score

    def with_score(self) -> "ModelSizes":
        """Return the sizes of the reward model: a scalar head in place of that of the vocabulary,
        which is left out as a tied one is."""
        score = TensorSpec(SCORE, (1, self.text.hidden), Part.score)
        body = (tensor for tensor in self.tensors if tensor.part is not Part.head)
        return replace(self, tied=True, tensors=(*body, score))


def lacks_mtp_head(path: str) -> ConfigError:
    """Return the error of a model without an MTP head that is to be trained."""
    return ConfigError(
        f"trains an MTP head (mtp.*), and {path} has none",
        key="model.mtp",
        found="train",
        remedy="give a checkpoint that has one, or leave model.mtp out",
    )


def text_tensors(text: TextSizes, names: HFNames) -> Iterator[TensorSpec]:
    """Yield the tensors of the decoder, without the head."""
    yield TensorSpec(names.embedding, (text.vocab, text.hidden), Part.embed)
    for number, layer in enumerate(text.layers):
        for param in layer.params(text.hidden):
            for tensor in param.tensors:
                full = names.layer(number) + tensor.name
                group, learns = tensor.lora_group, tensor.learns
                yield TensorSpec(full, tensor.shape, Part.decoder, group, learns)
    yield TensorSpec(names.final_norm, (text.hidden,), Part.decoder)


def tower_tensors(
    tower: nn.Module, prefix: str, marks: Mapping[str, str], table: str
) -> Iterator[TensorSpec]:
    """Yield the tensors of Hugging Face's own tower. `marks` are parts of the names of linears, by
    their groups among the LoRA targets. The name of the table of positions ends with `table`."""
    for name, param in tower.named_parameters():
        part = Part.merger if marks["merger"] in name else Part.vision
        found = [group for group, mark in marks.items() if mark in name and param.dim() == 2]
        group = found[0] if found else None
        full, is_table = prefix + name, name.endswith(table)
        yield TensorSpec(full, tuple(param.shape), part, group, param.requires_grad, is_table)


# A function that makes queries, keys and values from the output of the tower's first linear, cos,
# sin and the number of heads.
TowerHeads = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
# Chains of small operations in a tower's blocks: FusedOps of model/fused_ops.py, which no family
# imports.
TowerChains = Any
