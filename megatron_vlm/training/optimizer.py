"""Optimizer step from gradients to new weights: data parallel wrapping, the one normalisation, the
optimizer."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor, nn

from megatron_vlm.config.optimizer_spec import ADAM_SETTINGS, OptimizerSpec, optimizer_spec
from megatron_vlm.config.schema import Config, OptimConfig
from megatron_vlm.distributed.grid import GroupAxis, RankGroups
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import Part
from megatron_vlm.hf.weight_map import Entry
from megatron_vlm.model.megatron_versions import grads_for_norm
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.comm_overlap import GradReduce, WeightGather
from megatron_vlm.training.muon import use_muon
from megatron_vlm.training.offload import MainsWithoutMemory, offload_optimizer
from megatron_vlm.training.optimizer_parts import main_weights
from megatron_vlm.training.small_adamw import SmallAdamW


@dataclass(frozen=True)
class AdamStep:
    """AdamW's settings for one step, in place of the configured ones. As in the configuration,
    norms and biases do not decay, and a part with its own weight decay keeps it."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float  # global norm; 0: no clipping
    # Step even without gradients, as if all were 0: momentum and decay move the weights.
    without_gradients: bool = False

    @staticmethod
    def from_config(optim: OptimConfig) -> "AdamStep":
        """Return the configured settings, which apply to steps without settings of their own."""
        return AdamStep(**{name: getattr(optim, name) for name in ADAM_SETTINGS})

    def __post_init__(self) -> None:
        for name, good, limits in (
            ("beta1", 0 <= self.beta1 < 1, "of at least 0 and below 1"),
            ("beta2", 0 <= self.beta2 < 1, "of at least 0 and below 1"),
            ("eps", 0 < self.eps < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "of at least 0"),
            ("clip_grad", 0 <= self.clip_grad < math.inf, "of at least 0 (0: no clipping)"),
        ):
            if not good:
                raise ConfigError(
                    place="optim_step",
                    key=name,
                    found=getattr(self, name),
                    allowed=f"a finite number {limits}",
                )


def step_settings(optim: OptimConfig, adam: AdamStep | None) -> AdamStep:
    """Return the settings of a step: those that it has of its own, or the configured ones."""
    if adam is None:
        return AdamStep.from_config(optim)
    if not optimizer_spec(optim).step_settings:
        raise ConfigError(
            f"has settings of AdamW for one step, and optim.name={optim.name} has others as well",
            place="optim_step",
            key="adam",
            found=adam,
            remedy="leave it out: the settings in the group optim hold for every step",
        )
    return adam


def check_lr(lr: float | None) -> None:
    """Refuse a learning rate that would make the weights not finite."""
    if lr is not None and not 0 <= lr < math.inf:
        raise ConfigError(
            place="optim_step", key="lr", found=lr, allowed="a finite number of at least 0"
        )


def shards_optimizer(cfg: Config, grid: RankGroups) -> bool:
    """Return whether optimizer state is sharded. With one replica, that would only copy it
    around."""
    return cfg.parallel.distributed_optimizer and grid.dp.size > 1


def is_gather_overlapped(cfg: Config, grid: RankGroups) -> bool:
    """Return whether new weights are gathered while other work runs."""
    return cfg.parallel.overlap_param_gather and shards_optimizer(cfg, grid)


def wrap_data_parallel(
    cfg: Config, chunks: Sequence[StageModel], grid: RankGroups
) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DDP: fp32 gradient buffers, reduced (or scattered) over the DP
    ranks."""
    wrapped = [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=cfg.parallel.overlap_grad_reduce,
                overlap_param_gather=is_gather_overlapped(cfg, grid),
                use_distributed_optimizer=shards_optimizer(cfg, grid),
            ),
            module=chunk,
        )
        for chunk in chunks
    ]
    # Megatron's schedules find these hooks on the model's config, which all chunks share.
    config = chunks[0].config
    reduces = [GradReduce(chunk) for chunk in wrapped if cfg.parallel.overlap_grad_reduce]
    config.finalize_model_grads_func = partial(finalize_grads, grid, reduces)
    if cfg.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def finalize_grads(
    grid: RankGroups,
    reduces: Sequence[GradReduce],
    chunks: list[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    **kwargs: object,
) -> None:
    """Run Megatron's reductions and the division by the global token count, then the tower's
    part."""
    for reduce in reduces:
        reduce.begin_first()
    megatron_finalize(chunks, num_tokens, **kwargs)
    for reduce in reduces:
        reduce.end()
    sum_shared_images(chunks[0].module, grid.tp)


def sum_shared_images(model: StageModel, tp: GroupAxis) -> None:
    """Sum the tower's gradients over TP, where each TP rank encoded only its own images."""
    if not (model.pre_process and model.share_images) or tp.size == 1:
        return
    works = [
        dist.all_reduce(
            param.main_grad,  # type: ignore[attr-defined]
            group=tp.group,
            async_op=True,
        )
        for param in model.vision_model.parameters()
        if param.requires_grad
    ]
    for work in works:
        work.wait()


def build_optimizer(
    cfg: Config,
    chunks: Sequence[DistributedDataParallel],
    entries: Mapping[nn.Parameter, Entry],
    grid: RankGroups,
) -> MegatronOptimizer:
    """Build the optimizer with fp32 main weights, whose state parallel.distributed_optimizer shards
    over DP. `entries` has the place of each parameter in the table of names. A collective."""
    optim, model_config, spec = cfg.optim, chunks[0].config, optimizer_spec(cfg.optim)
    parts = {param: entry.part for param, entry in entries.items()}
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=shards_optimizer(cfg, grid),
        overlap_param_gather=is_gather_overlapped(cfg, grid),
    )
    overrides = {**get_standard_config_overrides(config), **_part_overrides(optim, parts)}
    with MainsWithoutMemory() if optim.offload else nullcontext():
        optimizer = get_megatron_optimizer(
            config, list(chunks), config_overrides=overrides, use_gloo_process_groups=False
        )
    set_adam(optimizer, AdamStep.from_config(optim))
    if spec.states == "fp32":
        for group in optimizer.param_groups:
            if "foreach" in group:  # torch's AdamW: neither TE nor Apex provides a fused one
                group["fused"] = True
    if optim.offload:
        offload_optimizer(optimizer, list(entries), optim.offload, spec)
    elif spec.states != "fp32":
        _use_small_moments(optimizer, spec, list(entries))
    if spec.matrix_state_names:
        use_muon(optimizer, optim, entries, grid)
    return optimizer


def _use_small_moments(
    optimizer: MegatronOptimizer, spec: OptimizerSpec, params: Collection[nn.Parameter]
) -> None:
    """Replace the AdamW that Megatron has made. The groups stay the same objects, because
    Megatron's optimizers keep them as well."""
    starts = {each.main: each.start for each in main_weights(optimizer, params)}
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            chained.optimizer = SmallAdamW(chained.optimizer.param_groups, spec, starts)


def _part_overrides(
    optim: OptimConfig, parts: Mapping[nn.Parameter, Part]
) -> dict[ParamKey, ParamGroupOverride]:
    """Return groups for the parts that have a learning rate of their own."""
    overrides = {}
    for part in (Part.vision, Part.merger):
        lr = getattr(optim, f"{part.switch}_lr")
        if lr is not None:
            chosen = ParamWithNamePredicate(
                name=part, fn=lambda param, _, part=part: parts[param] is part
            )
            overrides[ParamKey(with_name_predicate=chosen)] = ParamGroupOverride(max_lr=lr)
    return overrides


def set_lr(optimizer: MegatronOptimizer, lr: float, base: float) -> None:
    """Set `lr` in place of the configured `base`; parts with a rate of their own scale with it."""
    for group in optimizer.param_groups:
        own = group["max_lr"]
        group["lr"] = lr if own == base else lr * (own / base)


def set_adam(optimizer: MegatronOptimizer, adam: AdamStep) -> None:
    """Set the parameters of AdamW except for the learning rate."""
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps
        # Megatron marks norms and biases with wd_mult=0 but leaves applying it to its own
        # scheduler (optimizer_param_scheduler.py in 0.16), which is not used here.
        group["weight_decay"] = adam.weight_decay * group["wd_mult"]


def apply_gradients(
    optimizer: MegatronOptimizer,
    gather: WeightGather,
    grid: RankGroups,
    device: torch.device,
    limit: float,
) -> float:
    """Clip the gradients to a norm of at most `limit`, unless that is 0, and apply them. Return
    their norm before clipping. Apply nothing if it is not finite: Megatron checks that only with a
    loss scaler, which bf16 and fp32 do not use."""
    optimizer.prepare_grads()
    norm = gradient_norm(optimizer, grid, device)
    if math.isfinite(norm):
        gather.finish()  # for weights that no forward waited for, e.g. without images
        _clip(optimizer, norm, limit)
        optimizer.step_with_ready_grads()
        gather.start()
    return norm


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, grid: RankGroups, device: torch.device) -> float:
    """Return the norm of all gradients, the same on every rank. A collective.

    If neither Transformer Engine nor Apex is installed, Megatron's own function waits for the norm
    of each tensor, one after the other; here the host waits once."""
    parts = optimizer.chained_optimizers
    if grid.ep.size == 1:
        squared, group = _sum_of_squares(parts, device), optimizer.get_grad_stats_parallel_group()
    else:
        # Experts and other parameters have different numbers of copies, and a stage may have no
        # experts. So all ranks add up what they hold, divided by the number of copies.
        squared, group = torch.zeros((), device=device), dist.group.WORLD
        for part in parts:
            sharded = isinstance(part, DistributedOptimizer)
            copies = 1 if sharded else (grid.edp if _has_experts(part) else grid.dp).size
            squared += _sum_of_squares([part], device) / copies
    dist.all_reduce(squared, group=group)
    return float(squared) ** 0.5


def _sum_of_squares(parts: Sequence[MegatronOptimizer], device: torch.device) -> Tensor:
    """Return the sum of the squares of this rank's gradients."""
    grads = [grad for part in parts for grad in grads_for_norm(part)]
    if not grads:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(grads)).norm() ** 2


def _has_experts(part: MegatronOptimizer) -> bool:
    """Return whether an optimizer updates experts. Megatron makes a separate optimizer for them."""
    return any(group["is_expert_parallel"] for group in part.param_groups)


@torch.no_grad()
def _clip(optimizer: MegatronOptimizer, norm: float, limit: float) -> None:
    """Scale the gradients to a norm of at most `limit`; 0 leaves them unchanged."""
    factor = limit / (norm + 1e-6)  # the same as in Megatron and torch
    params = [param for part in optimizer.chained_optimizers for param in part.get_parameters()]
    grads = [param.grad for param in params if param.grad is not None]
    if grads and limit > 0 and factor < 1:
        torch._foreach_mul_(grads, factor)
