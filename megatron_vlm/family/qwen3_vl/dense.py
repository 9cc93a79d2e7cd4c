"""Qwen3-VL: the fields of its config.json and its decoder."""

from collections.abc import Iterator, Set

from transformers import PretrainedConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_vlm.family.decoder_layers import DenseMLP, Experts, FullAttention, LayerSpec
from megatron_vlm.family.qwen import check_fields, make_family, model_sizes
from megatron_vlm.family.qwen3_vl.dense_fields import QWEN3_VL_FIELDS
from megatron_vlm.family.spec import ModelSizes, TextSizes

_MROPE_SECTION = (24, 20, 20)  # transformers' default


def layers_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    """Check the kinds of the layers. Yield whether they pass, and the problem's text."""
    text, kinds = config.text_config, ["full_attention"]
    layers = getattr(text, "layer_types", None)
    yield (
        layers is None or list(layers) == kinds * text.num_hidden_layers,
        f"text_config.layer_types={layers}, not {kinds[0]} in each layer",
    )


def sizes_of(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    check_fields(config, QWEN3_VL_FIELDS, layers_fit)
    return make_sizes(config)


def make_sizes(
    config: PretrainedConfig, experts: Experts | None = None, expert_layers: Set[int] = frozenset()
) -> ModelSizes:
    """Return the sizes of a model with these checked fields, with experts in these layers of the
    decoder."""
    text = config.text_config
    attention = FullAttention(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rotary_dim=text.head_dim,
    )
    dense = LayerSpec(attention, DenseMLP(text.intermediate_size))
    sparse = dense if experts is None else LayerSpec(attention, experts)
    text_sizes = TextSizes(
        hidden=text.hidden_size,
        layers=tuple(
            sparse if number in expert_layers else dense for number in range(text.num_hidden_layers)
        ),
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        rope_theta=text.rope_parameters["rope_theta"],
        mrope_section=tuple(text.rope_parameters.get("mrope_section", _MROPE_SECTION)),
        pad_id=text.pad_token_id,
    )
    return model_sizes(config, text_sizes, Qwen3VLVisionModel)


QWEN3_VL = make_family("qwen3_vl", sizes_of, Qwen3VLVisionModel)
