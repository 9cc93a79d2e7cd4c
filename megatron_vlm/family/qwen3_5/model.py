"""Qwen3.5, 3.6 and 3.8: layers of gated delta nets and of gated attention, with an MLP or experts.

The tower is Qwen3-VL's without DeepStack."""

from collections.abc import Iterator
from dataclasses import replace

from transformers import PretrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

from megatron_vlm.family import decoder_layers
from megatron_vlm.family.qwen.model import check_fields, make_family, model_sizes
from megatron_vlm.family.qwen.tiny import tiny_parts
from megatron_vlm.family.qwen3_5.fields import QWEN3_5_FIELDS, QWEN3_5_MOE_FIELDS
from megatron_vlm.family.spec import ModelSizes, TextSizes

_MROPE_SECTION = (11, 11, 10)  # transformers' default
_LINEAR, _FULL = "linear_attention", "full_attention"


def _layers_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    text = config.text_config
    kinds, count = list(text.layer_types), text.num_hidden_layers
    yield (
        len(kinds) == count and set(kinds) <= {_LINEAR, _FULL},
        f"text_config.layer_types={kinds}, not {_LINEAR} or {_FULL} for each of the {count} layers",
    )
    # The planner and Megatron's config take the sizes of attention from such a layer.
    yield _FULL in kinds, f"text_config.layer_types={kinds}, without a layer of {_FULL}"
    interval = getattr(text, "full_attention_interval", None)
    yield (
        interval is None or kinds == [_kind(n, interval) for n in range(count)],
        f"text_config.full_attention_interval={interval}, but layer_types={kinds}",
    )
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    yield (
        values % keys == 0,
        f"text_config.linear_num_value_heads={values}, not a multiple of "
        f"linear_num_key_heads={keys}",
    )
    factor = text.rope_parameters.get("partial_rotary_factor", 1.0)
    copied = getattr(text, "partial_rotary_factor", factor)
    yield (
        copied == factor,
        f"text_config.partial_rotary_factor={copied} (0.25 if absent), but rope_parameters has "
        f"{factor}",
    )
    width = int(text.head_dim * factor)
    yield (
        width >= 2 and width % 2 == 0,
        f"text_config.rope_parameters.partial_rotary_factor={factor}, of which {width} values of a "
        f"head of {text.head_dim} rotate, not an even number",
    )


def _kind(number: int, interval: int) -> str:
    return _LINEAR if (number + 1) % interval else _FULL


def qwen3_5_sizes(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json, without experts."""
    check_fields(config, QWEN3_5_FIELDS, _layers_fit)
    text = _text_sizes(config, decoder_layers.DenseMLP(config.text_config.intermediate_size))
    return _with_mtp_head(model_sizes(config, text, Qwen3_5VisionModel))


def qwen3_5_moe_sizes(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json, with experts."""
    check_fields(config, QWEN3_5_MOE_FIELDS, _experts_fit)
    text = config.text_config
    experts = decoder_layers.Experts(
        text.num_experts,
        text.num_experts_per_tok,
        text.moe_intermediate_size,
        text.shared_expert_intermediate_size,
    )
    sizes = model_sizes(config, _text_sizes(config, experts), Qwen3_5MoeVisionModel)
    return _with_mtp_head(sizes)


def _with_mtp_head(sizes: ModelSizes) -> ModelSizes:
    """Return the sizes with the MTP head, whose layer has full attention, and the shapes of
    its tensors outside of the layer."""
    attention = sizes.text.attentions[0]
    full = next(layer for layer in sizes.text.layers if layer.mixer is attention)
    mtp = decoder_layers.MtpHeadSpec(full)
    shapes = {
        mtp.prefix + tensor.name: tensor.shape
        for param in mtp.params(sizes.text.hidden)
        for tensor in param.tensors
        if not tensor.name.startswith("layers.")
    }
    return replace(sizes, passthrough=shapes, mtp=mtp)


def _experts_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    yield from _layers_fit(config)
    top_k, count = config.text_config.num_experts_per_tok, config.text_config.num_experts
    yield top_k <= count, f"text_config.num_experts_per_tok={top_k}, of num_experts={count}"


def _text_sizes(config: PretrainedConfig, ffn: decoder_layers.FeedForward) -> TextSizes:
    text = config.text_config
    rope = text.rope_parameters
    dim = int(text.head_dim * rope.get("partial_rotary_factor", 1.0))
    section = tuple(rope.get("mrope_section", _MROPE_SECTION))
    attention = decoder_layers.FullAttention(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rotary=decoder_layers.MRoPE(dim, rope["rope_theta"], section),
        gated=True,
    )
    linear = decoder_layers.GatedDeltaNet(
        key_heads=text.linear_num_key_heads,
        value_heads=text.linear_num_value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        kernel=text.linear_conv_kernel_dim,
    )
    mixers: dict[str, decoder_layers.Mixer] = {_LINEAR: linear, _FULL: attention}
    return TextSizes(
        hidden=text.hidden_size,
        layers=tuple(decoder_layers.LayerSpec(mixers[kind], ffn) for kind in text.layer_types),
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        pad_id=text.pad_token_id,
        centered_norms=True,
    )


# The MTP head, which is copied unless it is trained (model.mtp).
_PASSTHROUGH = ("mtp.*",)

_TINY = tiny_parts(qwen3_5_sizes, qwen3_5_moe_sizes)

QWEN3_5 = make_family("qwen3_5", qwen3_5_sizes, Qwen3_5VisionModel, _PASSTHROUGH, _TINY)
QWEN3_5_MOE = make_family("qwen3_5_moe", qwen3_5_moe_sizes, Qwen3_5MoeVisionModel, _PASSTHROUGH)
