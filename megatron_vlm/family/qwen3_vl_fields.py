"""The fields of Qwen3-VL's config.json, as transformers holds them, by what is done with them."""

from typing import Any

from megatron_vlm.family.fields import KnownFields

# Fields of every part, as transformers holds them: the names with an underscore are its own.
_IDLE = {
    *("transformers_version", "architectures", "_name_or_path", "_commit_hash", "dtype"),
    *("id2label", "label2id", "problem_type", "initializer_range", "chunk_size_feed_forward"),
    *("_attn_implementation_internal", "_experts_implementation_internal", "use_cache"),
    *("bos_token_id", "eos_token_id", "_post_init_done"),
}
_OUTPUTS = {"output_hidden_states", "_output_attentions"}
_FIXED: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "return_dict": (True,)}

TOP = KnownFields(
    {"text_config", "vision_config", "image_token_id", "video_token_id", "tie_word_embeddings"},
    {*_IDLE, *_OUTPUTS, "vision_start_token_id", "vision_end_token_id", "pad_token_id"},
    {**_FIXED, "model_type": ("qwen3_vl",), "quantization_config": (None,)},
)
TEXT = KnownFields(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "pad_token_id"),
        *("tie_word_embeddings", "layer_types"),  # as far as they say the same as the others
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
    {"rope_theta", "mrope_section"},
    set(),
    {
        "rope_type": ("default",),
        "type": ("default", "mrope"),  # an older name, which rope_type overrules
        "mrope_interleaved": (True,),
        "partial_rotary_factor": (1.0,),
    },
)
# The tower is transformers' own module, made from this part of the config.
VISION = KnownFields(
    {
        *("depth", "hidden_size", "hidden_act", "intermediate_size", "num_heads", "in_channels"),
        *("patch_size", "spatial_merge_size", "temporal_patch_size", "out_hidden_size"),
        *("num_position_embeddings", "deepstack_visual_indexes", "rope_parameters"),
    },
    _IDLE,
    {
        **_FIXED,
        "model_type": ("qwen3_vl_vision",),
        "output_hidden_states": (False,),
        "_output_attentions": (False,),
    },
)
VISION_ROPE = KnownFields({"rope_theta"}, set(), {"rope_type": ("axial",)})
