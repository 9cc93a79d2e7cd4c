"""Tiny checkpoints: their sizes, and what a family has in them. The command line knows its own
options from here, without torch and transformers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vlm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def _option(default: int | float | str, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a tiny model. They are odd on purpose where round numbers could hide a mistake."""

    family: str = _option("qwen3_vl", "qwen3_vl, qwen3_5 (gated delta nets), or gemma4")
    layers: int = _option(4, "decoder layers")
    hidden: int = _option(64, "width of the decoder")
    intermediate: int = _option(176, "width of the decoder's MLP")
    heads: int = _option(4, "attention heads; parallel.tp must divide them")
    kv_heads: int = _option(2, "heads of keys and values; parallel.tp must divide them")
    head_dim: int = _option(24, "width of a head")  # it is not hidden / heads
    vocab: int = _option(512, "tokens of the tokenizer, trained on the spot")
    vision_depth: int = _option(3, "blocks of the vision tower")
    vision_hidden: int = _option(32, "width of the tower")
    vision_heads: int = _option(2, "attention heads of the tower")
    vision_intermediate: int = _option(80, "width of the tower's MLP")
    deepstack: int = _option(3, "DeepStack features: decoder layers that also see the tower")
    patch_size: int = _option(16, "side of a patch in pixels")
    tied: bool = _option(False, "tie embedding and head, which gemma4 always does")
    experts: int = _option(0, "experts of a decoder layer; with 0 it is a dense model")
    top_k: int = _option(2, "of the experts, those that each token goes to")
    expert_intermediate: int = _option(40, "width of an expert")
    dense_layers: int = _option(0, "first decoder layers that have an MLP in place of experts")
    sparse_step: int = _option(1, "every so many-th of the other layers has experts")
    shared_expert_intermediate: int = _option(56, "qwen3_5: width of the shared expert")
    full_attention_interval: int = _option(
        4, "qwen3_5 and gemma4: every so many-th layer has full attention"
    )
    sliding_window: int = _option(32, "gemma4: tokens that a token sees in the other layers")
    pooling: int = _option(3, "gemma4: patches on a side of the square that is a token, at least 2")
    linear_key_heads: int = _option(2, "qwen3_5: key heads of a gated delta net")
    linear_value_heads: int = _option(4, "qwen3_5: value heads of a gated delta net")
    linear_key_dim: int = _option(16, "qwen3_5: width of a key head of a gated delta net")
    linear_value_dim: int = _option(24, "qwen3_5: width of a value head of a gated delta net")
    max_decay: float = _option(1.0, "qwen3_5: largest decay of a head; transformers draws up to 16")
    mtp_layers: int = _option(0, "qwen3_5: layers of the MTP head (model.mtp)")
    from_scratch: bool = _option(
        False, "initial weights from which a model this small learns to see"
    )
    seed: int = _option(0, "of the weights")


CORPUS = """system user assistant You are a helpful assistant. What is the name of the subject in
this photo? The subject in this photo is: What colour is the circle, the square, the triangle? How
many shapes are there? Where is the red one: left, right, above, below? one two three four five six
seven eight nine ten red green blue yellow black white orange purple. Describe this image. It shows
a picture of a large, small, round thing. Answer with a single word. yes no 0123456789"""


def check_vocab(vocab: int, fewest: int, named: int) -> None:
    """Refuse a vocabulary without room for what any text needs and for tokens with names."""
    if vocab < fewest + named:
        raise ConfigError(
            f"is too small for {fewest} tokens of text and {named} with names",
            key="vocab",
            found=vocab,
            allowed=f"at least {fewest + named}",
        )


@dataclass(frozen=True)
class TinyParts:
    """Parts of a family's tiny checkpoint, in addition to random weights."""

    tokenizer: "Callable[[int], PreTrainedTokenizerBase]"  # with so many tokens, and the template
    config: "Callable[[TinySpec, PreTrainedTokenizerBase], PretrainedConfig]"
    change_weights: Callable[[Any, TinySpec], None]  # takes transformers' model
    # Adds the processors, and tensors that transformers leaves out, to a folder with the weights.
    add_files: "Callable[[Path, TinySpec, PretrainedConfig], None]"
    # Ends of the names of parameters that released checkpoints have in fp32, never rounded.
    in_fp32: tuple[str, ...] = ()
