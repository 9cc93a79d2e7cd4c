"""Build one pipeline stage from a checkpoint's config.json: its TransformerConfig and its model.

Weight gradients of the decoder's linears are never rounded to bf16: each product is added to
Megatron's fp32 buffer as it is computed. Megatron does this with a kernel of Apex
(gradient_accumulation_fusion); where Apex is missing, torch's own product takes its place.

Shapes: T tokens, I inputs and O outputs of a linear."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.family import Family
from megatron_vlm.family.flash_attention import TORCH
from megatron_vlm.family.spec import ModelSizes, TextSizes
from megatron_vlm.family.tower_attention import set_kernel
from megatron_vlm.hf.block_weight import BlockWeight, replace_parameter
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.model.attention_kernels import TOWER, attention_shapes, choose_kernels
from megatron_vlm.model.constraints import check_built
from megatron_vlm.model.delta_rule import choose_delta_rule
from megatron_vlm.model.fused_ops import FusedOps, compiles
from megatron_vlm.model.gated_delta_net import keeps_fp32
from megatron_vlm.model.layer_specs import BuildOptions, block_spec
from megatron_vlm.model.offload_activations import ActivationOffload
from megatron_vlm.model.rope import build_rotary
from megatron_vlm.model.stage_model import StageModel


def add_product(given_TI: Tensor, grad_TO: Tensor, total_OI: Tensor) -> None:
    """Add grad^T @ given to the total. The operands may be bf16; the total is fp32."""
    if given_TI.is_cuda and given_TI.dtype is not torch.float32:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_TO.t(), given_TI, torch.float32, out=total_OI)
    else:  # no CPU kernel takes bf16 and returns fp32
        total_OI.addmm_(grad_TO.float().t(), given_TI.float())


def accumulates_fp32(setting: bool | None, dtype: torch.dtype, platform: Platform) -> bool:
    """Return whether Megatron should add products to its buffers (`model.fp32_weight_gradients`),
    and make it able to. This is a collective on CUDA in bf16: all replicas must accumulate the same
    gradients."""
    if dtype is torch.float32 or setting is False or (setting is None and not platform.is_cuda):
        return False
    failure = None
    if not layers._grad_accum_fusion_available:
        failure = _failure(dtype, platform)
    if setting and failure:
        raise ConfigError(
            f": torch {torch.__version__} cannot add a product of {dtype} to fp32 here ({failure})",
            key="model.fp32_weight_gradients",
            found=True,
            remedy="set it to null",
        )
    if platform.is_cuda and all_reduce_max(int(failure is not None)):
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
        layers._grad_accum_fusion_available = True
    return True


def _failure(dtype: torch.dtype, platform: Platform) -> str | None:
    """Return what goes wrong with a product that bf16 would round: 1 + 256 ones, added to 1/2."""
    ones = torch.ones(257, 16, dtype=dtype, device=platform.device)
    total = torch.full((16, 16), 0.5, device=platform.device)
    try:
        add_product(ones, ones, total)
    except (AttributeError, RuntimeError) as error:  # an older torch has no such operator
        return str(error).splitlines()[0]
    is_wrong = total.ne(257.5).any()
    return f"it gives {total[0, 0]:.1f} in place of 257.5" if is_wrong else None


def compute_dtype(cfg: Config, platform: Platform) -> torch.dtype:
    """Return the dtype of weights and activations; gradients and optimizer state are always
    fp32."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return dtypes.get(cfg.train.precision, platform.default_dtype)


def transformer_config(
    cfg: Config, text: TextSizes, dims: ParallelDims, platform: Platform, compiled: bool
) -> TransformerConfig:
    """Return Megatron's config of the decoder. Comments explain the values that are not sizes."""
    is_te = BACKENDS[cfg.model.backend].fuses_norms
    dtype = compute_dtype(cfg, platform)
    recompute: dict[str, Any] = {}
    if cfg.model.recompute == "full":
        recompute = dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    elif cfg.model.recompute == "selective":
        recompute = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    experts: dict[str, Any] = {}
    if text.experts is not None:
        experts = dict(
            num_moe_experts=text.experts.count,
            moe_router_topk=text.experts.top_k,
            moe_router_pre_softmax=True,  # the router chooses from probabilities
            moe_ffn_hidden_size=text.experts.width,
        )
    # Megatron's config has room for one kind of attention. Layers of others have their own sizes.
    attention = text.attentions[0]
    return TransformerConfig(
        num_layers=text.num_layers,
        hidden_size=text.hidden,
        ffn_hidden_size=text.dense_width,
        num_attention_heads=attention.heads,
        num_query_groups=attention.kv_heads,
        kv_channels=attention.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=text.norm_eps,
        attention_output_gate=attention.gated,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        mrope_section=[],  # StageModel replaces Megatron's rotary embedding
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        expert_model_parallel_size=dims.ep,
        pipeline_model_parallel_layout=dims.megatron_layout() if dims.pp > 1 else None,
        # Micro-batches keep their own length, and DeepStack features lengthen the message to the
        # next stage.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths checks it even without MoE
        # The loss is summed; the gradient is divided once by the global count of tokens.
        calculate_per_token_loss=True,
        # Every weight comes from the checkpoint: no weight is initialised at random.
        perform_initialization=False,
        use_cpu_initialization=not platform.is_cuda,
        deallocate_pipeline_outputs=True,  # a sent output keeps its graph, without its data
        gradient_accumulation_fusion=accumulates_fp32(
            cfg.model.fp32_weight_gradients, dtype, platform
        ),
        # These fusions need CUDA kernels of Apex or Transformer Engine.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # Megatron compiles these. The torch backend has chains of its own (model/layer_specs.py);
        # Megatron accepts them in place of its SwiGLU where it takes them for Transformer Engine's.
        use_te_activation_func=not is_te,
        bias_activation_fusion=is_te and compiled,
        bias_dropout_fusion=is_te and compiled,
        **recompute,
        **experts,
    )


def build_chunks(
    cfg: Config,
    family: Family,
    hf_config: PretrainedConfig,
    sizes: ModelSizes,
    grid: RankGroups,
    platform: Platform,
    in_blocks: Collection[tuple[int, str]] = (),
    others: Sequence[StageModel] | None = None,
) -> list[StageModel]:
    """Build this stage's chunks of the model, with unset weights on the device in their dtype.
    Weights `in_blocks`, by chunk and name, are codes of lora.base. The weights of `others`, chunks
    of the same stage, are shared."""
    dims, stage = grid.dims, grid.pp.rank
    compiled = compiles(cfg.model.compile, platform)
    config = transformer_config(cfg, sizes.text, dims, platform, compiled)
    unset_on = platform.device
    if others is not None or in_blocks:
        # Memory of the host is allocated only once something is written there.
        config.use_cpu_initialization, unset_on = True, torch.device("cpu")
    chains = FusedOps.compile() if compiled else FusedOps()
    shapes = attention_shapes(cfg, sizes, dims, config.params_dtype)
    kernels = choose_kernels(cfg.model.attention, shapes, platform)
    rule = None
    if (net := sizes.text.delta_net) is not None:
        rule = choose_delta_rule(cfg.model.delta_rule, net, config.params_dtype, platform)
    backend, group = cfg.model.backend, grid.ep.group
    options = BuildOptions(backend, chains, kernels, group, unset_on, sizes.tokens, rule)
    share = cfg.model.offload_activations
    offload = ActivationOffload(share, platform.device) if share else None
    chunks = []
    for chunk in range(dims.virtual_stages):
        tower = None
        if grid.first and chunk == 0:
            again = cfg.model.recompute_vision
            tower = family.tower(hf_config, platform.device, again, chains)
            set_kernel(tower, kernels.get(TOWER, TORCH))
        dtype = None if BACKENDS[cfg.model.backend].fuses_norms else config.params_dtype
        model = StageModel(
            config,
            sizes,
            padded_vocab=dims.padded_vocab(sizes.text.vocab),
            layers=block_spec(
                options,
                sizes.text,
                [sizes.text.layers[number] for number in dims.layers_of(stage, chunk)],
            ),
            tower=tower,
            last=grid.is_last_stage and chunk == dims.virtual_stages - 1,
            share_images=cfg.model.share_images,
            rotary=build_rotary(sizes.text, platform.device, dtype),
            chunk=chunk if dims.virtual_stages > 1 else None,
            offload=offload,
        )
        if model.post_process and sizes.trains_mtp and sizes.mtp is not None:
            model.add_mtp_head(block_spec(options, sizes.text, [sizes.mtp.layer]))
        check_built(model.config, dims)
        model.kernels = kernels
        # Only parameters are cast: rotary frequencies are buffers and must stay in fp32.
        shared = {} if others is None else dict(others[chunk].named_parameters())
        for name, param in list(model.named_parameters()):
            if isinstance(shared.get(name), BlockWeight):
                replace_parameter(model, name, shared[name])
            elif name in shared:
                param.data = shared[name].data
            elif (chunk, name) in in_blocks:
                assert cfg.lora.base is not None
                form = cfg.lora.base, param.shape, config.params_dtype, platform.device
                replace_parameter(model, name, BlockWeight.empty(*form))
            else:
                dtype = torch.float if keeps_fp32(param) else config.params_dtype
                param.data = param.data.to(platform.device, dtype)
        chunks.append(model)
    return chunks
