"""Qwen3-VL-MoE: Qwen3-VL with experts in the decoder. Everything else is the same."""

from collections.abc import Iterator

from transformers import PretrainedConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_vlm.family.decoder_layers import Experts
from megatron_vlm.family.field_rules import other_model
from megatron_vlm.family.qwen import check_fields, make_family
from megatron_vlm.family.qwen3_vl.dense import layers_fit, make_sizes
from megatron_vlm.family.qwen3_vl.moe_fields import QWEN3_VL_MOE_FIELDS
from megatron_vlm.family.spec import ModelSizes


def moe_sizes_of(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    check_fields(config, QWEN3_VL_MOE_FIELDS, layers_fit)
    if problems := [problem for fits, problem in _experts_fit(config) if not fits]:
        raise other_model(config.name_or_path, problems)
    text = config.text_config
    step, dense = text.decoder_sparse_step, set(text.mlp_only_layers)
    sparse = {n for n in range(text.num_hidden_layers) if (n + 1) % step == 0} - dense
    experts = Experts(text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size)
    return make_sizes(config, experts, sparse)


def _experts_fit(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    """Check that values of the experts fit each other. Yield for each check whether it passes, and
    the problem's text."""
    text = config.text_config
    count, top_k, layers = text.num_experts, text.num_experts_per_tok, text.num_hidden_layers
    yield top_k <= count, f"text_config.num_experts_per_tok={top_k}, of num_experts={count}"
    dense = text.mlp_only_layers
    yield (
        set(dense) <= set(range(layers)),
        f"text_config.mlp_only_layers={list(dense)}, not layers of num_hidden_layers={layers}",
    )


QWEN3_VL_MOE = make_family("qwen3_vl_moe", moe_sizes_of, Qwen3VLVisionModel)
