"""The fields of the config.json of Qwen3.5, 3.6 and 3.8, with and without experts, by their use."""

from typing import Any

from megatron_vlm.family.field_rules import (
    LIST,
    POSITIVE_OR_0,
    SHARE,
    KnownFields,
    ModelFields,
    Rule,
    or_null,
    whole_number,
)
from megatron_vlm.family.qwen3_vl.fields import QWEN3_VL_FIELDS as QWEN3_VL
from megatron_vlm.family.qwen3_vl.fields import QWEN3_VL_MOE_FIELDS as QWEN3_VL_MOE

_COUNT = whole_number(1, 2**10)

_LINEAR = {
    "linear_conv_kernel_dim": whole_number(2, 2**6),
    "linear_key_head_dim": _COUNT,
    "linear_value_head_dim": _COUNT,
    "linear_num_key_heads": _COUNT,
    "linear_num_value_heads": _COUNT,
    "layer_types": or_null(LIST),
    # layer_types overrules it, and must agree with it.
    "full_attention_interval": or_null(_COUNT),
    "partial_rotary_factor": SHARE,  # a copy of the field in rope_parameters
}
# transformers keeps these fields of released checkpoints and computes as if they had these values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish",),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([],),
    "mtp_use_dedicated_embeddings": (False,),
}


def _top(base: KnownFields, model_type: str) -> KnownFields:
    return base.changed(model_type=(model_type,), language_model_only=(False,))


def _text(base: KnownFields, model_type: str, **carried_out: Rule) -> KnownFields:
    # transformers sets the first two; the tensors of the MTP head show that there is one.
    idle = ("base_model_tp_plan", "ignore_keys_at_rope_validation", "mtp_num_hidden_layers")
    without = (
        *("partial_rotary_factor", "sliding_window", "use_sliding_window"),
        *("decoder_sparse_step", "mlp_only_layers"),
    )
    rules = _LINEAR | carried_out
    return base.changed(rules, idle, without=without, **_FIXED, model_type=(model_type,))


def _vision(base: KnownFields, *model_types: str) -> KnownFields:
    blocks = "deepstack_visual_indexes"
    return base.changed(without=[blocks], model_type=model_types, deepstack_visual_indexes=([],))


_ROPE = QWEN3_VL.text_rope.changed(
    {"partial_rotary_factor": SHARE}, without=["partial_rotary_factor"]
)

QWEN3_5_FIELDS = ModelFields(
    _top(QWEN3_VL.top, "qwen3_5"),
    _text(QWEN3_VL.text, "qwen3_5_text"),
    _ROPE,
    _vision(QWEN3_VL.vision, "qwen3_5_vision"),
    QWEN3_VL.vision_rope,
)
# transformers reads the number of experts under one name, and no layer has a plain MLP.
_MOE_TEXT = QWEN3_VL_MOE.text.changed(
    without=("num_local_experts", "intermediate_size", "norm_topk_prob")
)
QWEN3_5_MOE_FIELDS = ModelFields(
    _top(QWEN3_VL.top, "qwen3_5_moe"),
    _text(
        _MOE_TEXT,
        "qwen3_5_moe_text",
        shared_expert_intermediate_size=whole_number(1, 2**20),
        router_aux_loss_coef=POSITIVE_OR_0,
    ),
    _ROPE,
    _vision(QWEN3_VL.vision, "qwen3_5_moe_vision"),
    QWEN3_VL.vision_rope,
)
