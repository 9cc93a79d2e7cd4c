"""From a checkpoint's config.json to one pipeline stage: the TransformerConfig and the model."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megatron_vlm.config.schema import Config, ModelConfig
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.model.constraints import check_built
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel


def compute_dtype(cfg: Config, platform: Platform) -> torch.dtype:
    """The dtype of weights and activations; gradients and optimizer state are always fp32."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return named.get(cfg.train.precision, platform.default_dtype)


def transformer_config(
    cfg: Config, hf_config: PretrainedConfig, dims: ParallelDims, platform: Platform
) -> TransformerConfig:
    """Megatron's view of the decoder. What it decides beyond sizes is commented."""
    text = hf_config.text_config
    dtype = compute_dtype(cfg, platform)
    recompute: dict[str, Any] = {}
    if cfg.model.recompute == "full":
        recompute = dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    elif cfg.model.recompute == "selective":
        recompute = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        mrope_section=text.rope_parameters["mrope_section"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        expert_model_parallel_size=dims.ep,
        pipeline_model_parallel_layout=dims.megatron_layout() if dims.pp > 1 else None,
        # Micro-batches keep their own length, and DeepStack features lengthen what is sent.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths checks it, MoE or not
        # The loss is summed; the gradient is divided once by the global count of tokens.
        calculate_per_token_loss=True,
        # Every weight comes from the checkpoint: nothing is drawn at random.
        perform_initialization=False,
        use_cpu_initialization=not platform.is_cuda,
        deallocate_pipeline_outputs=True,  # what was sent on is kept as a graph, without its data
        batch_p2p_comm=platform.is_cuda,  # gloo has no batched send and receive of Megatron's kind
        # These fusions need CUDA kernels of Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=platform.is_cuda,
        bias_dropout_fusion=platform.is_cuda,
        **recompute,
    )


def build_model(
    cfg: Config, hf_config: PretrainedConfig, dims: ParallelDims, platform: Platform
) -> Qwen3VLGPTModel:
    """This rank's stage, weights unset, frozen parts frozen, on the device in its dtype."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = transformer_config(cfg, hf_config, dims, platform)
    model = Qwen3VLGPTModel(
        config,
        hf_config,
        padded_vocab=dims.padded_vocab(hf_config.text_config.vocab_size),
        num_layers=dims.layers_per_stage[stage],
        first=stage == 0,
        last=stage == dims.pp - 1,
        backend=cfg.model.backend,
        share_images=cfg.model.share_images,
        recompute_vision=cfg.model.recompute_vision,
        device=platform.device,
    )
    check_built(model.config)
    _mark_tensor_parallel(model)
    for param in model.parameters():
        # Parameters only: rotary frequencies are buffers and must stay in fp32.
        param.data = param.data.to(platform.device, config.params_dtype)
    freeze(model, cfg)
    return model


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Say which weights are cut over TP. Megatron 0.16 does so only while it initialises weights;
    unmarked, all but TP rank 0's part would be missing from the gradient norm."""
    cut = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        dim = cut.get(type(module))
        # A tied head on the embedding's stage has no weight of its own.
        if dim is None or module.weight is None:
            continue
        if not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def part_of(name: str) -> str:
    """Which freezable part a parameter of our model belongs to."""
    if not name.startswith("vision_model."):
        return "language"
    return "merger" if "merger" in name else "vision"


def is_frozen(name: str, cfg: ModelConfig) -> bool:
    """Whether a parameter of our model stays as it is loaded."""
    return bool(getattr(cfg, f"freeze_{part_of(name)}"))


def freeze(model: torch.nn.Module, cfg: Config) -> None:
    """Turn gradients off in the parts that model.freeze_* names."""
    for name, param in model.named_parameters():
        if is_frozen(name, cfg.model):
            param.requires_grad_(False)
