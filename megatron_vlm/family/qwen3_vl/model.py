"""Qwen3-VL: the fields of its config.json and its decoder, with an MLP or experts."""

from collections.abc import Iterator, Sequence

from transformers import PretrainedConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_vlm.family.decoder_layers import (
    DenseMLP,
    Experts,
    FeedForward,
    FullAttention,
    LayerSpec,
    MRoPE,
)
from megatron_vlm.family.field_rules import other_model
from megatron_vlm.family.qwen.model import check_fields, make_family, model_sizes
from megatron_vlm.family.qwen.tiny import tiny_parts
from megatron_vlm.family.qwen3_vl.fields import QWEN3_VL_FIELDS, QWEN3_VL_MOE_FIELDS
from megatron_vlm.family.spec import ModelSizes, TextSizes

_MROPE_SECTION = (24, 20, 20)  # transformers' default


def layers_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    """Check the kinds of the layers, as Checks."""
    text, kinds = config.text_config, ["full_attention"]
    layers = getattr(text, "layer_types", None)
    yield (
        layers is None or list(layers) == kinds * text.num_hidden_layers,
        f"text_config.layer_types={layers}, not {kinds[0]} in each layer",
    )


def sizes_of(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    check_fields(config, QWEN3_VL_FIELDS, layers_fit)
    text = config.text_config
    return make_sizes(config, [DenseMLP(text.intermediate_size)] * text.num_hidden_layers)


def make_sizes(config: PretrainedConfig, ffns: Sequence[FeedForward]) -> ModelSizes:
    """Return the sizes of a model, from checked fields and the feed-forward of each layer."""
    text = config.text_config
    rope = text.rope_parameters
    section = tuple(rope.get("mrope_section", _MROPE_SECTION))
    attention = FullAttention(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rotary=MRoPE(text.head_dim, rope["rope_theta"], section),
    )
    text_sizes = TextSizes(
        hidden=text.hidden_size,
        layers=tuple(LayerSpec(attention, ffn) for ffn in ffns),
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        pad_id=text.pad_token_id,
    )
    return model_sizes(config, text_sizes, Qwen3VLVisionModel)


QWEN3_VL = make_family("qwen3_vl", sizes_of, Qwen3VLVisionModel, tiny=tiny_parts())


def moe_sizes_of(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    check_fields(config, QWEN3_VL_MOE_FIELDS, layers_fit)
    if problems := [problem for fits, problem in _experts_fit(config) if not fits]:
        raise other_model(config.name_or_path, problems)
    text = config.text_config
    step, dense = text.decoder_sparse_step, DenseMLP(text.intermediate_size)
    experts = Experts(text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size)
    numbers = range(text.num_hidden_layers)
    is_dense = [(n + 1) % step or n in text.mlp_only_layers for n in numbers]
    return make_sizes(config, [dense if is_so else experts for is_so in is_dense])


def _experts_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    text = config.text_config
    count, top_k, layers = text.num_experts, text.num_experts_per_tok, text.num_hidden_layers
    yield top_k <= count, f"text_config.num_experts_per_tok={top_k}, of num_experts={count}"
    dense = text.mlp_only_layers
    yield (
        set(dense) <= set(range(layers)),
        f"text_config.mlp_only_layers={list(dense)}, not layers of num_hidden_layers={layers}",
    )


QWEN3_VL_MOE = make_family("qwen3_vl_moe", moe_sizes_of, Qwen3VLVisionModel)
