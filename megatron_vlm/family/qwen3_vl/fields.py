"""The fields of Qwen3-VL's config.json, with and without experts, as transformers holds them, by
their use."""

from typing import Any

from megatron_vlm.family.field_rules import (
    LIST,
    OBJECT,
    POSITIVE,
    POSITIVE_OR_0,
    QUANTIZATION,
    SWITCH,
    KnownFields,
    ModelFields,
    list_of,
    or_null,
    whole_number,
)
from megatron_vlm.family.field_rules import TEXT_RULE as STRING

# Fields of every part, as transformers holds them: the names with an underscore are its own.
_IDLE = {
    *("transformers_version", "architectures", "_name_or_path", "_commit_hash", "dtype"),
    *("id2label", "label2id", "problem_type", "initializer_range", "chunk_size_feed_forward"),
    *("_attn_implementation_internal", "_experts_implementation_internal", "use_cache"),
    *("bos_token_id", "eos_token_id", "_post_init_done"),
}
_OUTPUTS = {"output_hidden_states", "_output_attentions"}
_FIXED: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "return_dict": (True,)}

_WIDTH = whole_number(1, 2**20)
_COUNT = whole_number(1, 2**10)
_ID = whole_number(0, 2**31 - 1)

DENSE_TOP = KnownFields(
    {
        "text_config": OBJECT,
        "vision_config": OBJECT,
        "image_token_id": _ID,
        "video_token_id": _ID,
        "tie_word_embeddings": SWITCH,
        "quantization_config": QUANTIZATION,
    },
    {*_IDLE, *_OUTPUTS, "vision_start_token_id", "vision_end_token_id", "pad_token_id"},
    {**_FIXED, "model_type": ("qwen3_vl",)},
)
DENSE_TEXT = KnownFields(
    {
        "vocab_size": whole_number(1, 2**26),
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _COUNT,
        "head_dim": _COUNT,
        "num_attention_heads": _COUNT,
        "num_key_value_heads": or_null(_COUNT),
        "max_position_embeddings": whole_number(1, 2**31 - 1),
        "rms_norm_eps": POSITIVE,
        "rope_parameters": OBJECT,
        "pad_token_id": or_null(_ID),
        # These must agree with the other fields.
        "tie_word_embeddings": SWITCH,
        "layer_types": or_null(LIST),
    },
    {*_IDLE, *_OUTPUTS, "max_window_layers"},
    {
        **_FIXED,
        "model_type": ("qwen3_vl_text",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1.0,),
    },
)
TEXT_ROPE = KnownFields(
    {"rope_theta": POSITIVE, "mrope_section": list_of(whole_number(0, 2**10))},
    set(),
    {
        "rope_type": ("default",),
        "type": ("default", "mrope"),  # an older name, which rope_type overrules
        "mrope_interleaved": (True,),
        "partial_rotary_factor": (1.0,),
    },
)
# The tower is transformers' own module, made from this part of the config.
DENSE_VISION = KnownFields(
    {
        "depth": _COUNT,
        "hidden_size": _WIDTH,
        "hidden_act": STRING,
        "intermediate_size": _WIDTH,
        "num_heads": _COUNT,
        "in_channels": _COUNT,
        "patch_size": _COUNT,
        "spatial_merge_size": _COUNT,
        "temporal_patch_size": _COUNT,
        "out_hidden_size": _WIDTH,
        "num_position_embeddings": _WIDTH,
        "deepstack_visual_indexes": list_of(whole_number(0, 2**10)),
        "rope_parameters": OBJECT,
    },
    _IDLE,
    {
        **_FIXED,
        "model_type": ("qwen3_vl_vision",),
        "output_hidden_states": (False,),
        "_output_attentions": (False,),
    },
)
VISION_ROPE = KnownFields({"rope_theta": POSITIVE}, set(), {"rope_type": ("axial",)})

_EXPERTS = whole_number(1, 2**12)
MOE_TEXT = DENSE_TEXT.changed(
    {
        # One field has two names: the first in the released checkpoints, the second in
        # transformers.
        "num_experts": _EXPERTS,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS,
        "moe_intermediate_size": whole_number(1, 2**20),
        "decoder_sparse_step": whole_number(1, 2**10),
        "mlp_only_layers": or_null(list_of(whole_number(0, 2**10))),
        # transformers adds this loss only if it returns the router's logits.
        "router_aux_loss_coef": POSITIVE_OR_0,
    },
    # The tensor parallel plan of transformers, which transformers adds if the head is tied.
    {"base_model_tp_plan"},
    model_type=("qwen3_vl_moe_text",),
    norm_topk_prob=(True,),
    output_router_logits=(False,),
)
QWEN3_VL_FIELDS = ModelFields(DENSE_TOP, DENSE_TEXT, TEXT_ROPE, DENSE_VISION, VISION_ROPE)
QWEN3_VL_MOE_FIELDS = ModelFields(
    DENSE_TOP.changed(model_type=("qwen3_vl_moe",)),
    MOE_TEXT,
    TEXT_ROPE,
    DENSE_VISION.changed(model_type=("qwen3_vl_moe_vision",)),
    VISION_ROPE,
)
