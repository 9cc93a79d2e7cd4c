"""The fields of Qwen3-VL-MoE's config.json: Qwen3-VL's fields and those of the experts."""

from megatron_vlm.family.field_rules import (
    POSITIVE_OR_0,
    KnownFields,
    ModelFields,
    list_of,
    or_null,
)
from megatron_vlm.family.field_rules import whole_number as _whole
from megatron_vlm.family.qwen3_vl.dense_fields import QWEN3_VL_FIELDS as DENSE

_EXPERTS = _whole(1, 2**12)

MOE_TOP = KnownFields(
    DENSE.top.carried_out, DENSE.top.idle, {**DENSE.top.fixed, "model_type": ("qwen3_vl_moe",)}
)
MOE_TEXT = KnownFields(
    {
        **DENSE.text.carried_out,
        # One field has two names: the first in the released checkpoints, the second in
        # transformers.
        "num_experts": _EXPERTS,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS,
        "moe_intermediate_size": _whole(1, 2**20),
        "decoder_sparse_step": _whole(1, 2**10),
        "mlp_only_layers": or_null(list_of(_whole(0, 2**10))),
        # transformers adds this loss only if it returns the router's logits.
        "router_aux_loss_coef": POSITIVE_OR_0,
    },
    # The tensor parallel plan of transformers, which transformers adds if the head is tied.
    {*DENSE.text.idle, "base_model_tp_plan"},
    {
        **DENSE.text.fixed,
        "model_type": ("qwen3_vl_moe_text",),
        "norm_topk_prob": (True,),
        "output_router_logits": (False,),
    },
)
MOE_VISION = KnownFields(
    DENSE.vision.carried_out,
    DENSE.vision.idle,
    {**DENSE.vision.fixed, "model_type": ("qwen3_vl_moe_vision",)},
)
QWEN3_VL_MOE_FIELDS = ModelFields(MOE_TOP, MOE_TEXT, DENSE.text_rope, MOE_VISION, DENSE.vision_rope)
