"""Gradients to new weights: data parallel wrapping, the one normalisation, AdamW."""

import math

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor

from megatron_vlm.config.schema import Config, OptimConfig
from megatron_vlm.model.build import part_of
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel


def shards_optimizer(cfg: Config) -> bool:
    """Whether optimizer state is sharded: with one replica that would only copy it around."""
    replicas = parallel_state.get_data_parallel_world_size()
    return cfg.parallel.distributed_optimizer and replicas > 1


def wrap_data_parallel(cfg: Config, model: Qwen3VLGPTModel) -> DistributedDataParallel:
    """Megatron's DDP: fp32 gradient buffers, reduced (or scattered) over the DP ranks."""
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=cfg.parallel.overlap_grad_reduce,
            use_distributed_optimizer=shards_optimizer(cfg),
        ),
        module=model,
    )
    # Megatron's schedules find these hooks on the model's config.
    model.config.finalize_model_grads_func = finalize_grads
    if cfg.parallel.overlap_grad_reduce:
        model.config.no_sync_func = ddp.no_sync
    return ddp


def finalize_grads(
    chunks: list[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    **kwargs: object,
) -> None:
    """Megatron's reductions and the division by the global token count, then the tower's part."""
    megatron_finalize(chunks, num_tokens, **kwargs)
    sum_shared_images(chunks[0].module)


def sum_shared_images(model: Qwen3VLGPTModel) -> None:
    """Sum the tower's gradients over TP, where each TP rank encoded its own images only."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not (model.pre_process and model.share_images) or dist.get_world_size(group) == 1:
        return
    works = [
        dist.all_reduce(param.main_grad, group=group, async_op=True)
        for param in model.vision_model.parameters()
        if param.requires_grad
    ]
    for work in works:
        work.wait()


def build_optimizer(cfg: Config, ddp: DistributedDataParallel) -> MegatronOptimizer:
    """AdamW with fp32 main weights, its state sharded over DP by parallel.distributed_optimizer."""
    optim = cfg.optim
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=ddp.config.bf16,
        params_dtype=ddp.config.params_dtype,
        use_distributed_optimizer=shards_optimizer(cfg),
    )
    overrides = {**get_standard_config_overrides(config), **_part_overrides(optim)}
    optimizer = get_megatron_optimizer(
        config, [ddp], config_overrides=overrides, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        # Megatron marks norms and biases with wd_mult=0 but leaves applying it to its own
        # scheduler (optimizer_param_scheduler.py in 0.16), which we do not use.
        group["weight_decay"] = group.get("start_wd", optim.weight_decay) * group["wd_mult"]
        if "foreach" in group:  # torch's AdamW, where neither TE nor Apex brings a fused one
            group["fused"] = True
    return optimizer


def _part_overrides(optim: OptimConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Groups for the parts that have a learning rate or weight decay of their own."""
    overrides = {}
    for part, lr, decay in (
        ("vision", optim.vision_lr, optim.vision_weight_decay),
        ("merger", optim.merger_lr, optim.merger_weight_decay),
    ):
        own: ParamGroupOverride = {}
        if lr is not None:
            own["max_lr"] = lr
        if decay is not None:
            own["start_wd"] = decay
        if own:
            chosen = ParamWithNamePredicate(
                name=part,
                fn=lambda _, name, part=part: part_of(name.removeprefix("module.")) == part,
            )
            overrides[ParamKey(with_name_predicate=chosen)] = own
    return overrides


def set_lr(optimizer: MegatronOptimizer, lr: float, base: float) -> None:
    """`lr` in place of the configured `base`; parts with a rate of their own follow in
    proportion."""
    for group in optimizer.param_groups:
        own = group["max_lr"]
        group["lr"] = lr if own == base else lr * (own / base)


def step(optimizer: MegatronOptimizer) -> float:
    """Clip and apply the gradients; their norm before. Nothing is applied where it is not finite:
    Megatron looks for that only with a loss scaler, which bf16 and fp32 do without."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        optimizer.step()
    return norm
