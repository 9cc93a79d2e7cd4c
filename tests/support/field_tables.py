"""Fields of config.json by their use, for each family: the tables of test_model_fields.py and
test_preflight.py, and the config.json of released models."""

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    Gemma4Config,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

_LINEAR, _SLIDING, _FULL = "linear_attention", "sliding_attention", "full_attention"
_TIED = {"text_config.tie_word_embeddings": "tie_word_embeddings"}


@dataclass(frozen=True)
class FieldTables:
    """The fields of a family. Each dict has other values than the tiny model's."""

    config: type[PretrainedConfig]  # transformers' class
    tiny: dict[str, Any]  # sizes of the tiny model
    carried: dict[str, Any]  # carried out: all of a part change at once, and shapes follow them
    idle: dict[str, Any]  # they change nothing, all at once
    refused: dict[str, Any]  # one at a time: declared fields, and others that transformers acts on
    more: dict[str, dict[str, Any]] = field(default_factory=dict)  # further changes, each by itself
    elsewhere: dict[str, Any] = field(default_factory=dict)  # refused as in another family's tests
    # Fields that have the value of another.
    copies: dict[str, str] = field(
        default_factory=lambda: _TIED | {"vision_config.out_hidden_size": "text_config.hidden_size"}
    )


# Other values of the fields that are carried out. Shapes follow them.
_CARRIED: dict[str, Any] = {
    "image_token_id": 476,
    "video_token_id": 477,
    "tie_word_embeddings": True,
    "text_config.vocab_size": 509,
    "text_config.hidden_size": 48,
    "text_config.intermediate_size": 160,
    "text_config.num_hidden_layers": 3,
    "text_config.num_attention_heads": 8,
    "text_config.num_key_value_heads": 4,
    "text_config.head_dim": 16,
    "text_config.max_position_embeddings": 1000,
    "text_config.rms_norm_eps": 1e-2,
    "text_config.rope_parameters.rope_theta": 1234.0,
    "text_config.rope_parameters.mrope_section": [6, 1, 1],
    "text_config.pad_token_id": 7,
    "vision_config.depth": 3,
    "vision_config.hidden_size": 48,
    "vision_config.hidden_act": "relu",
    "vision_config.intermediate_size": 72,
    "vision_config.num_heads": 4,
    "vision_config.in_channels": 1,
    "vision_config.patch_size": 8,
    "vision_config.spatial_merge_size": 1,
    "vision_config.temporal_patch_size": 1,
    "vision_config.num_position_embeddings": 30,
    "vision_config.deepstack_visual_indexes": [1, 0],
    "vision_config.rope_parameters.rope_theta": 100.0,
}
# Other values of the fields that change nothing, all at once.
_IDLE_OF_PARTS: dict[str, Any] = {
    "transformers_version": "4.57.1",
    "architectures": ["Other"],
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 2,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "initializer_range": 0.5,
}
_IDLE: dict[str, Any] = {
    **{f"{part}{name}": value for part in ("", "text_config.", "vision_config.")
       for name, value in _IDLE_OF_PARTS.items()},
    "output_hidden_states": True,
    "text_config.output_hidden_states": True,
    "text_config.use_cache": False,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    # The classes of transformers do not declare these. It or other tools write them.
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 3,
    "eos_token_id": 3,
    "text_config.bos_token_id": 3,
    "text_config.eos_token_id": 3,
    "torch_dtype": "float32",
    "_name_or_path": "other",
    "attn_implementation": "eager",
    "temperature": 0.5,
    "hidden_size": 64,  # a copy of text_config's
    "text_config.use_sliding_window": False,
    "text_config.sliding_window": None,
    "text_config.max_window_layers": 28,
    "text_config.layer_types": ["full_attention", "full_attention"],
    "text_config.rope_parameters.type": "mrope",
    "quantization_config": None,
}  # fmt: skip
# Refused values of declared fields, and of others that transformers acts upon.
_REFUSED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "model_type": "qwen2_vl",
    "rope_parameters": {"rope_type": "yarn"},
    "quantization_config": {"quant_method": "fp8"},
    "transformers_weights": "other.safetensors",
    "auto_map": {"AutoModel": "x.y"},
    "return_dict": False,
    "text_config.return_dict": False,
    "text_config.is_encoder_decoder": True,
    "text_config.model_type": "qwen3",
    "text_config.hidden_act": "gelu",
    "text_config.attention_bias": True,
    "text_config.attention_dropout": 0.1,
    "text_config.tie_word_embeddings": True,  # but not at the top level
    "text_config.sliding_window": 8,
    "text_config.use_sliding_window": True,
    "text_config.layer_types": ["full_attention", "sliding_attention"],
    "text_config.attention_chunk_size": 8,
    "text_config.is_causal": False,
    "text_config.per_layer_config": {"1": {"rms_norm_eps": 0.1}},
    "text_config.partial_rotary_factor": 0.5,
    "text_config.num_experts": 8,
    "text_config.scale_embeddings": True,  # a field of unknown meaning
    "text_config.num_attention_heads": 3,
    "text_config.num_key_value_heads": 3,
    "text_config.head_dim": 23,
    "text_config.pad_token_id": 512,
    "text_config.hidden_size": "wide",
    "text_config.rope_parameters.mrope_interleaved": False,
    "text_config.rope_parameters.mrope_section": [6, 6],
    "text_config.rope_parameters.type": "yarn",
    "text_config.rope_parameters.partial_rotary_factor": 0.5,
    "text_config.rope_parameters.factor": 2.0,
    "vision_config.is_encoder_decoder": True,
    "vision_config.model_type": "qwen2_5_vl",
    "vision_config.output_hidden_states": True,
    "vision_config.return_dict": False,
    "vision_config.gradient_checkpointing": True,
    "vision_config.head_dim": 8,
    "vision_config.num_heads": 3,
    "vision_config.patch_size": [16, 16],
    "vision_config.temporal_patch_size": [2, 2],
    "vision_config.out_hidden_size": 48,
    "vision_config.deepstack_visual_indexes": [0, 0],
    "vision_config.rope_parameters.rope_type": "linear",
    "vision_config.rope_parameters.partial_rotary_factor": 0.5,
    "image_token_id": 474,  # the id of videos
    "video_token_id": 512,
}


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# Qwen3.5, 3.6 and 3.8.
_CARRIED_5: dict[str, Any] = {
    **_without(_CARRIED, "vision_config.deepstack_visual_indexes"),
    "text_config.head_dim": 32,
    "text_config.layer_types": [_LINEAR, _FULL, _LINEAR],
    "text_config.partial_rotary_factor": 0.5,
    "text_config.rope_parameters.partial_rotary_factor": 0.5,
    "text_config.rope_parameters.mrope_section": [2, 5, 1],
    "text_config.linear_conv_kernel_dim": 3,
    "text_config.linear_key_head_dim": 8,
    "text_config.linear_value_head_dim": 20,
    "text_config.linear_num_key_heads": 3,
    "text_config.linear_num_value_heads": 9,
}
# Fields of released files that transformers keeps and does not read, with the values of its code.
_IDLE_5: dict[str, Any] = {
    **_without(
        _IDLE,
        *("text_config.layer_types", "text_config.max_window_layers"),
        *("text_config.use_sliding_window", "text_config.sliding_window"),
    ),
    "language_model_only": False,
    "text_config.attn_output_gate": True,
    "text_config.output_gate_type": "swish",
    "text_config.mamba_ssm_dtype": "float32",
    "text_config.mlp_only_layers": [],
    "text_config.mtp_num_hidden_layers": 1,
    "text_config.mtp_use_dedicated_embeddings": False,
    "text_config.full_attention_interval": 2,  # as the layers of the tiny model are
    "vision_config.deepstack_visual_indexes": [],
    "vision_config.model_type": "qwen3_5",  # transformers renames it
}
_REFUSED_5: dict[str, Any] = {
    **_REFUSED,
    "language_model_only": True,
    "text_config.model_type": "qwen3_next",
    "text_config.attn_output_gate": False,
    "text_config.output_gate_type": "sigmoid",
    "text_config.mamba_ssm_dtype": "bfloat16",
    "text_config.mlp_only_layers": [1],
    "text_config.mtp_use_dedicated_embeddings": True,
    "text_config.quantization_config": {"quant_method": "fp8"},
    "text_config.full_attention_interval": 4,  # layer_types says 2
    "text_config.layer_types": [_LINEAR] * 4,
    "text_config.linear_num_key_heads": 3,  # of 4 value heads
    "text_config.linear_num_value_heads": 0,
    "text_config.linear_conv_kernel_dim": 1,
    "text_config.linear_key_head_dim": "16",
    "text_config.linear_value_head_dim": 2**20,
    "text_config.rope_parameters.partial_rotary_factor": 1.5,
    "text_config.rope_parameters.scale": 2.0,
    "vision_config.deepstack_visual_indexes": [1],
    "vision_config.scale_embeddings": True,
    "vision_config.rope_parameters.scale": 2.0,
    "scale_embeddings": True,
}
# Layers in any order. The third is what transformers makes of the interval.
_MORE_5: dict[str, dict[str, Any]] = {
    "full first": {"text_config.layer_types": [_FULL, _LINEAR, _LINEAR, _LINEAR]},
    "linear last": {"text_config.layer_types": [_FULL, _FULL, _FULL, _LINEAR]},
    "interval": {"text_config.layer_types": None, "text_config.full_attention_interval": 3},
}
_EXPERTS = {
    "text_config.num_experts": 6,
    "text_config.num_experts_per_tok": 3,
    "text_config.moe_intermediate_size": 24,
    "text_config.shared_expert_intermediate_size": 72,
    "text_config.router_aux_loss_coef": 0.5,  # of a loss that transformers leaves out
}
# The fields that the two families share are refused by the same rules.
_REFUSED_MOE: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "quantization_config": {"quant_method": "fp8"},
    "text_config.model_type": "qwen3_5_text",
    "text_config.attn_output_gate": False,
    "text_config.mlp_only_layers": [0],
    "text_config.intermediate_size": 64,
    "text_config.decoder_sparse_step": 2,
    "text_config.norm_topk_prob": False,
    "text_config.output_router_logits": True,
    "text_config.num_experts_per_tok": 5,
    "text_config.num_experts": 0,
    "text_config.num_local_experts": 4,
    "text_config.shared_expert_intermediate_size": 0,
    "vision_config.model_type": "qwen3_5_vision",
}
# Of four layers, the second has experts.
_EXPERTS_VL: dict[str, Any] = {
    "text_config.num_hidden_layers": 4,
    "text_config.decoder_sparse_step": 2,
    "text_config.mlp_only_layers": [3],
    "text_config.num_experts": 6,
    "text_config.num_local_experts": 6,  # the name that transformers writes
    "text_config.num_experts_per_tok": 3,
    "text_config.moe_intermediate_size": 24,
    "text_config.router_aux_loss_coef": 0.5,
}
_REFUSED_VL_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "text_config.model_type": "qwen3_vl_text",
    "text_config.tie_word_embeddings": True,  # but not at the top level
    "text_config.norm_topk_prob": False,
    "text_config.output_router_logits": True,
    "text_config.num_experts_per_tok": 5,
    "text_config.num_local_experts": 0,
    "text_config.decoder_sparse_step": 0,
    "text_config.mlp_only_layers": [2],
    "text_config.shared_expert_intermediate_size": 8,
    "vision_config.model_type": "qwen3_vl",
}
# Gemma 4.
_ROPE_OF = "text_config.rope_parameters"
_CARRIED_GEMMA4: dict[str, Any] = {
    "image_token_id": 300,
    "video_token_id": 301,
    "audio_token_id": 400,  # no text has it: transformers embeds that token as the pad
    "tie_word_embeddings": False,
    "text_config.vocab_size": 523,
    "text_config.hidden_size": 48,
    "text_config.intermediate_size": 160,
    "text_config.num_hidden_layers": 3,
    "text_config.layer_types": [_FULL, _SLIDING, _FULL],
    "text_config.num_attention_heads": 8,
    "text_config.num_key_value_heads": 2,
    "text_config.num_global_key_value_heads": 4,
    "text_config.head_dim": 16,
    "text_config.global_head_dim": 40,
    "text_config.sliding_window": 6,
    "text_config.max_position_embeddings": 1000,
    "text_config.rms_norm_eps": 1e-2,
    "text_config.final_logit_softcapping": 2.0,
    "text_config.pad_token_id": 7,
    f"{_ROPE_OF}.full_attention.rope_theta": 1234.0,
    f"{_ROPE_OF}.full_attention.partial_rotary_factor": 0.5,
    f"{_ROPE_OF}.sliding_attention.rope_theta": 123.0,
    "vision_config.hidden_size": 48,
    "vision_config.intermediate_size": 72,
    "vision_config.num_hidden_layers": 3,
    "vision_config.num_attention_heads": 4,
    "vision_config.num_key_value_heads": 4,
    "vision_config.head_dim": 8,
    "vision_config.rms_norm_eps": 1e-2,
    "vision_config.pooling_kernel_size": 2,
    "vision_config.patch_size": 8,
    "vision_config.position_embedding_size": 30,
    "vision_config.standardize": False,
    "vision_config.rope_parameters.rope_theta": 50.0,
}
_MORE_GEMMA4: dict[str, dict[str, Any]] = {
    "experts": {
        "text_config.enable_moe_block": True,
        "text_config.num_experts": 6,
        "text_config.top_k_experts": 3,
        "text_config.moe_intermediate_size": 24,
    },
    "values of their own": {"text_config.attention_k_eq_v": False},
    "images causal": {"text_config.use_bidirectional_attention": None},
    "no cap": {"text_config.final_logit_softcapping": None},
    "heads of layers": {
        "text_config.per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}}
    },
    "every sixth": {"text_config.layer_types": None, "text_config.num_hidden_layers": 6},
}
_IDLE_GEMMA4: dict[str, Any] = {
    **{f"{part}{name}": value for part in ("", "text_config.", "vision_config.")
       for name, value in _IDLE_OF_PARTS.items()},
    **dict.fromkeys(("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id"), 3),
    **dict.fromkeys(("eoa_token_index", "eos_token_id"), 3),
    "output_hidden_states": True,
    "text_config.output_hidden_states": True,
    "vision_soft_tokens_per_image": 70,
    "use_cache": False,
    "_name_or_path": "other",
    "attn_implementation": "eager",
    "quantization_config": None,
    "text_config.use_cache": False,
    "text_config.bos_token_id": 3,
    "text_config.eos_token_id": 3,
    "text_config.tie_word_embeddings": False,  # transformers reads the one at the top
    "text_config.vocab_size_per_layer_input": 7,
    "text_config.expert_intermediate_size": 7,
    "vision_config.max_position_embeddings": 7,
    "vision_config.default_output_length": 7,
    "vision_config.global_head_dim": 7,
    "vision_config.output_hidden_states": True,
}  # fmt: skip
_REFUSED_GEMMA4: dict[str, Any] = {
    f"{_ROPE_OF}.full_attention.mrope_section": [8, 4, 4],
    "is_encoder_decoder": True,
    "rope_parameters": {"rope_type": "yarn"},
    "quantization_config": {"quant_method": "fp8"},
    "transformers_weights": "other.safetensors",
    "auto_map": {"AutoModel": "x.y"},
    "return_dict": False,
    "audio_config": {"model_type": "gemma4_audio"},  # E2B and E4B, as the next three
    "text_config.hidden_size_per_layer_input": 256,
    "text_config.num_kv_shared_layers": 2,
    "vision_config.use_clipped_linears": True,
    "text_config.use_double_wide_mlp": True,  # E2B
    "text_config.use_bidirectional_attention": "all",
    "text_config.return_dict": False,
    "text_config.is_encoder_decoder": True,
    "text_config.model_type": "gemma3_text",
    "text_config.hidden_activation": "gelu",
    "text_config.attention_bias": True,
    "text_config.attention_dropout": 0.1,
    "text_config.attention_chunk_size": 8,
    "text_config.layer_types": [_SLIDING] * 4,
    "text_config.enable_moe_block": True,  # without a number of experts
    "text_config.another": 1,  # a field of unknown meaning
    "text_config.per_layer_config": {"3": {"rms_norm_eps": 0.1}},
    "text_config.num_attention_heads": 3,
    "text_config.num_key_value_heads": 3,
    "text_config.num_global_key_value_heads": 3,
    "text_config.head_dim": 23,
    "text_config.global_head_dim": 23,
    "text_config.sliding_window": 0,
    "text_config.pad_token_id": 512,
    "text_config.hidden_size": "wide",
    _ROPE_OF: {"rope_type": "default", "rope_theta": 1e4},
    f"{_ROPE_OF}.sliding_attention.partial_rotary_factor": 0.5,
    f"{_ROPE_OF}.full_attention.rope_type": "yarn",
    f"{_ROPE_OF}.full_attention.factor": 8.0,
    "vision_config.is_encoder_decoder": True,
    "vision_config.pooling_kernel_size": 1,
    "vision_config.model_type": "siglip_vision_model",
    "vision_config.return_dict": False,
    "vision_config.hidden_activation": "gelu",
    "vision_config.attention_bias": True,
    "vision_config.attention_dropout": 0.1,
    "vision_config.num_key_value_heads": 1,
    "vision_config.head_dim": 6,
    "vision_config.patch_size": [16, 16],
    "vision_config.rope_parameters.rope_type": "linear",
    "vision_config.rope_parameters.partial_rotary_factor": 0.5,
    "image_token_id": 512,
}
TABLES = {
    "gemma4": FieldTables(
        Gemma4Config,
        dict(family="gemma4", vision_depth=2),
        _CARRIED_GEMMA4,
        _IDLE_GEMMA4,
        _REFUSED_GEMMA4,
        _MORE_GEMMA4,
        copies=_TIED,
    ),
    "qwen3_vl": FieldTables(
        Qwen3VLConfig, dict(layers=2, vision_depth=2, deepstack=1), _CARRIED, _IDLE, _REFUSED
    ),
    "qwen3_vl_moe": FieldTables(
        Qwen3VLMoeConfig,
        dict(layers=2, vision_depth=2, deepstack=1, experts=4),
        _CARRIED | _EXPERTS_VL,
        _IDLE,
        _REFUSED_VL_MOE,
        elsewhere=_REFUSED,
    ),
    "qwen3_5": FieldTables(
        Qwen3_5Config,
        dict(family="qwen3_5", head_dim=64, vision_depth=2, full_attention_interval=2),
        _CARRIED_5,
        _IDLE_5,
        _REFUSED_5,
        _MORE_5,
    ),
    "qwen3_5_moe": FieldTables(
        Qwen3_5MoeConfig,
        dict(family="qwen3_5", head_dim=64, vision_depth=2, full_attention_interval=2, experts=4),
        _without(_CARRIED_5, "text_config.intermediate_size") | _EXPERTS,
        _IDLE_5 | {"vision_config.model_type": "qwen3_5_moe"},
        _REFUSED_MOE,
        elsewhere=_REFUSED_5,
    ),
}
# One setting for each kind of RoPE in transformers, as a config.json asks for it.
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,  # newer versions declare this and the next two
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "short_factor": [1.5] * 12,
        "long_factor": [2.5] * 12,
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


# model: (decoder layers, width, FFN width, heads, tied, depth of the tower, its width and FFN
# width, DeepStack)
RELEASED = {
    "2B": (28, 2048, 6144, 16, True, 24, 1024, 4096, [5, 11, 17]),
    "4B": (36, 2560, 9728, 32, True, 24, 1024, 4096, [5, 11, 17]),
    "8B": (36, 4096, 12288, 32, False, 27, 1152, 4304, [8, 16, 24]),
    "32B": (64, 5120, 25600, 64, False, 27, 1152, 4304, [8, 16, 24]),
}


def _tower(kind: str, depth: int, width: int, ffn: int, out: int) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": [],
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": width,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "model_type": kind,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": out,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def released(name: str) -> dict[str, Any]:
    """Return a config.json as transformers 4.57 wrote it for the released models."""
    layers, hidden, ffn, heads, tied, depth, width, vision_ffn, deepstack = RELEASED[name]
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": ffn,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": rope,
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": _tower("qwen3_vl", depth, width, vision_ffn, hidden)
        | {"deepstack_visual_indexes": deepstack},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


# model: (decoder layers, width, FFN or expert width, heads, key/value heads, value heads of a gated
# delta net, tied, depth of the tower, its width, FFN width and heads, largest TP)
RELEASED_5 = {
    "0.8B": (24, 1024, 3584, 8, 2, 16, True, 12, 768, 3072, 12, 2),
    "2B": (24, 2048, 6144, 8, 2, 16, True, 24, 1024, 4096, 16, 2),
    "4B": (32, 2560, 9216, 16, 4, 32, True, 24, 1024, 4096, 16, 4),
    "9B": (32, 4096, 12288, 16, 4, 32, False, 27, 1152, 4304, 16, 4),
    "27B": (64, 5120, 17408, 24, 4, 48, False, 27, 1152, 4304, 16, 4),
    "35B-A3B": (40, 2048, 512, 16, 2, 32, False, 27, 1152, 4304, 16, 1),
}


def released_5(name: str) -> dict[str, Any]:
    """Return a config.json with the fields of the released models: those up to 9B as Qwen3.5 has
    them, the others with the fields that Qwen3.6 and 3.8 have in addition."""
    layers, hidden, ffn, heads, kv_heads, value_heads, tied, *tower = RELEASED_5[name]
    depth, width, vision_ffn, vision_heads, _ = tower
    newer, kind = name in ("27B", "35B-A3B"), "qwen3_5_moe" if "-A" in name else "qwen3_5"
    tower_kind = f"{kind}_vision" if newer else kind
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "layer_types": [_LINEAR if (n + 1) % 4 else _FULL for n in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": 248320,
    }
    if newer:
        text |= {"bos_token_id": 248044, "pad_token_id": None, "partial_rotary_factor": 0.25}
        text["output_gate_type"] = "swish"
    else:
        text["mlp_only_layers"] = []
    if kind == "qwen3_5":
        text["intermediate_size"] = ffn
    else:
        text |= {"moe_intermediate_size": ffn, "shared_expert_intermediate_size": ffn}
        text |= {"num_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
        text["output_router_logits"] = False
    config = {
        "architectures": [f"Qwen3_5{'Moe' * ('-A' in name)}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": _tower(tower_kind, depth, width, vision_ffn, hidden)
        | {"num_heads": vision_heads},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }
    return config | ({"language_model_only": False} if newer else {})


# model: (decoder layers, width, MLP width, heads, key heads, key heads of full layers, experts of
# this width, largest TP)
RELEASED_GEMMA4: dict[str, tuple[Any, ...]] = {
    "31B": (60, 5376, 21504, 32, 16, 4, None, None, 4),
    "26B-A4B": (30, 2816, 2112, 16, 8, 2, 128, 704, 1),
}


def released_gemma4(name: str) -> dict[str, Any]:
    """Return a config.json with the fields of the released models, of which transformers reads
    neither `expert_intermediate_size` nor the tower's `global_head_dim`."""
    layers, hidden, ffn, heads, kv_heads, full_kv_heads, experts, width, _ = RELEASED_GEMMA4[name]
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    of_parts = {
        "_name_or_path": "",
        "architectures": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "chunk_size_feed_forward": 0,
        "dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "initializer_range": 0.02,
        "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "output_attentions": False,
        "output_hidden_states": False,
        "problem_type": None,
        "return_dict": True,
        "rms_norm_eps": 1e-06,
    }
    text = {
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": experts is not None,
        "eos_token_id": 1,
        "expert_intermediate_size": None,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": ffn,
        "layer_types": [_SLIDING if (n + 1) % 6 else _FULL for n in range(layers)],
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": width,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_global_key_value_heads": full_kv_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rope_parameters": {_FULL: full, _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"}},
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8 if experts else None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    vision = {
        "default_output_length": 280,
        "global_head_dim": 72,
        "head_dim": 72,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True,
        "use_clipped_linears": False,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": of_parts | text,
        "tie_word_embeddings": True,
        "transformers_version": "5.7.0",
        "video_token_id": 258884,
        "vision_config": of_parts | vision,
        "vision_soft_tokens_per_image": 280,
    }
