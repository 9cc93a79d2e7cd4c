"""The fields of the config.json of Gemma 4, with and without experts, by their use."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.family.field_rules import (
    LIST,
    OBJECT,
    POSITIVE,
    QUANTIZATION,
    SHARE,
    SWITCH,
    KnownFields,
    ModelFields,
    Rule,
    or_null,
    whole_number,
)
from megatron_vlm.family.qwen3_vl.fields import DENSE_TOP

_IDLE = DENSE_TOP.idle | {"base_model_tp_plan", "initializer_range"}
_FIXED: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "return_dict": (True,)}
_GELU = "gelu_pytorch_tanh"
_WIDTH = whole_number(1, 2**20)
_COUNT = whole_number(1, 2**10)
_ID = whole_number(0, 2**31 - 1)
_SMALL = "E2B and E4B have it"


def _is_rotary(value: Any, rope_type: str, *more: str) -> bool:
    """Return whether a rotary embedding has these fields and no others."""
    known = {"rope_type", "rope_theta", *more}
    return (
        isinstance(value, Mapping)
        and set(value) <= known
        and value.get("rope_type") == rope_type
        and POSITIVE.fits(value.get("rope_theta"))
        and SHARE.fits(value.get("partial_rotary_factor", 1.0))
    )


def _fits_layers(value: Any) -> bool:
    """Return whether single layers override only the fields of their heads: transformers holds
    the overrides as an object, and config.json by the number of the layer."""
    layers = getattr(value, "per_layer_overrides", value)
    return isinstance(layers, Mapping) and all(
        isinstance(own, Mapping)
        and own.keys() <= {"head_dim", "num_key_value_heads"}
        and all(map(_COUNT.fits, own.values()))
        for own in layers.values()
    )


_TOP = KnownFields(
    {
        "text_config": OBJECT,
        "vision_config": OBJECT,
        "image_token_id": _ID,
        "video_token_id": _ID,
        "audio_token_id": or_null(_ID),
        "tie_word_embeddings": SWITCH,
        "quantization_config": QUANTIZATION,
    },
    {
        *_IDLE,
        *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        "vision_soft_tokens_per_image",
    },
    {**_FIXED, "model_type": ("gemma4",), "audio_config": (None,)},
    {"audio_config": _SMALL},
)
_TEXT = KnownFields(
    {
        "vocab_size": whole_number(1, 2**26),
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _COUNT,
        "layer_types": or_null(LIST),
        "head_dim": _COUNT,
        "global_head_dim": or_null(_COUNT),
        "num_attention_heads": _COUNT,
        "num_key_value_heads": or_null(_COUNT),
        "num_global_key_value_heads": or_null(_COUNT),
        "per_layer_config": or_null(
            Rule("head_dim and num_key_value_heads of layers", _fits_layers)
        ),
        "attention_k_eq_v": SWITCH,
        "sliding_window": whole_number(1, 2**31 - 1),
        "use_bidirectional_attention": Rule(
            "'vision' or null", lambda value: value in ("vision", None)
        ),
        "max_position_embeddings": whole_number(1, 2**31 - 1),
        "rms_norm_eps": POSITIVE,
        "final_logit_softcapping": or_null(POSITIVE),
        "rope_parameters": OBJECT,
        "pad_token_id": or_null(_ID),
        "tie_word_embeddings": SWITCH,
        "enable_moe_block": SWITCH,
        "num_experts": or_null(whole_number(1, 2**12)),
        "top_k_experts": or_null(whole_number(1, 2**12)),
        "moe_intermediate_size": or_null(_WIDTH),
    },
    {*_IDLE, "vocab_size_per_layer_input", "expert_intermediate_size"} - {"pad_token_id"},
    {
        **_FIXED,
        "model_type": ("gemma4_text",),
        "hidden_activation": (_GELU,),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        # Embeddings of each layer, which an absent field has by default; layers that share keys.
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_double_wide_mlp": (False,),
    },
    {
        **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), _SMALL),
        "use_double_wide_mlp": "E2B has it",
    },
)
_TEXT_ROPE = KnownFields(
    {
        "sliding_attention": Rule(
            "rope_theta, with rope_type 'default'", lambda value: _is_rotary(value, "default")
        ),
        "full_attention": Rule(
            "rope_theta and partial_rotary_factor, with rope_type 'proportional'",
            lambda value: _is_rotary(value, "proportional", "partial_rotary_factor"),
        ),
    },
    set(),
    {},
)
# The parts of the tower are transformers' own modules, made from this part of the config.
_VISION = KnownFields(
    {
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _COUNT,
        "num_attention_heads": _COUNT,
        "num_key_value_heads": _COUNT,
        "head_dim": _COUNT,
        "rms_norm_eps": POSITIVE,
        "rope_parameters": OBJECT,
        "pooling_kernel_size": whole_number(1, 2**6),
        "patch_size": _COUNT,
        "position_embedding_size": _WIDTH,
        "standardize": SWITCH,
    },
    {*_IDLE, "max_position_embeddings", "default_output_length", "global_head_dim"},
    {
        **_FIXED,
        "model_type": ("gemma4_vision",),
        "hidden_activation": (_GELU,),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "use_clipped_linears": (False,),
    },
    {"use_clipped_linears": _SMALL},
)
# transformers replaces the released "default" by "axial", which means the same.
_VISION_ROPE = KnownFields({"rope_theta": POSITIVE}, set(), {"rope_type": ("axial", "default")})

GEMMA4_FIELDS = ModelFields(
    _TOP, _TEXT, _TEXT_ROPE, _VISION, _VISION_ROPE, "Gemma 4 31B or 26B-A4B"
)
