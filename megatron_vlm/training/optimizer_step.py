"""A step of the optimizer: the parts of parameters that it updates, its settings, the norm of the
gradients, and new weights.

Every optimizer of Megatron looks the same here: for each trainable parameter it has a flat part of
the fp32 main weight. The plain ones have the whole parameter, the distributed one a part of it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_vlm.config.optimizer_spec import ADAM_SETTINGS, OptimizerSpec, optimizer_spec
from megatron_vlm.config.schema import OptimConfig
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.host_copies import DeferredFigures, read_together
from megatron_vlm.errors import ConfigError
from megatron_vlm.model.megatron_versions import grads_for_norm
from megatron_vlm.training.adamw import Kernel, RangedAdamW, Scaling
from megatron_vlm.training.data_parallel import WeightGather


@dataclass(frozen=True)
class MainWeight:
    """The part of a parameter that an optimizer updates."""

    param: torch.nn.Parameter
    main: Tensor  # what the optimizer steps: the parameter itself, or an fp32 copy of its part
    optimizer: torch.optim.Optimizer
    start: int  # offset in the flattened parameter
    is_sharded: bool  # True: DP ranks have different parts; False: they all have the same one
    is_offloaded: bool = False  # the main weight is in host memory

    @property
    def model_part(self) -> Tensor:
        """The same part of the parameter, flat."""
        return self.param.detach().view(-1)[self.start : self.start + self.main.numel()]


# Settings of a group that may change from step to step.
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class SplitOptimizer(torch.optim.Optimizer):
    """Optimizers that divide the parameters of the same groups and have their settings. `offloaded`
    has the tensors on the host that take the place of some parameters."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        members: Sequence[torch.optim.Optimizer],
        offloaded: Mapping[Tensor, Tensor] | None = None,
    ):
        """Combine optimizers whose groups are `groups` with a part of the parameters."""
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.members = tuple(members)
        self.offloaded = offloaded or {}

    def share_settings(self) -> None:
        """Give the members the settings of the next step."""
        for member in self.members:
            for own, group in zip(member.param_groups, self.param_groups, strict=True):
                own.update({name: group[name] for name in _SETTINGS})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        self.share_settings()
        for member in self.members:
            member.step()


def groups_with(groups: Sequence[dict[str, Any]], params: Mapping[Tensor, Tensor]) -> list[Any]:
    """Return the groups with their parameters among these, each replaced."""
    return [
        {**group, "params": [params[each] for each in group["params"] if each in params]}
        for group in groups
    ]


def ranged_adamw(
    groups: Sequence[dict[str, Any]],
    weights: Sequence[MainWeight],
    spec: OptimizerSpec,
    kernel: Kernel | None,
) -> RangedAdamW:
    """Return AdamW over these weights. A kernel also writes the model's in bf16."""
    starts = {each.main: each.start for each in weights}
    copies = {w.main: w.model_part for w in weights if w.param.dtype == torch.bfloat16}
    return RangedAdamW(groups, spec, starts, kernel, copies)


def copy_to_model(weights: Sequence[MainWeight]) -> None:
    """Copy main weights to the model, rounded to its type."""
    for each in weights:
        each.model_part.copy_(each.main.view(-1))


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that update this rank's parameters, each of them once."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:  # a frozen stage has no optimizer
            yield from _members(chained.optimizer)


def _members(inner: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    return inner.members if isinstance(inner, SplitOptimizer) else (inner,)


def main_weights(
    optimizer: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts of these parameters that this rank's optimizer updates."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            yield from main_weights_of(chained, params)


def main_weights_of(
    chained: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts that one of Megatron's optimizers updates."""
    inner = chained.optimizer
    offloaded = inner.offloaded if isinstance(inner, SplitOptimizer) else {}
    owners = {
        main: member
        for member in _members(inner)
        for group in member.param_groups
        for main in group["params"]
    }

    def weight(param: torch.nn.Parameter, main: Tensor, start: int, sharded: bool) -> MainWeight:
        own = offloaded.get(main, main)
        return MainWeight(param, own, owners[own], start, sharded, own is not main)

    if isinstance(chained, DistributedOptimizer):
        for param, main in _sharded_mains(chained):
            start = chained._get_model_param_range_map(param)["param"].start
            yield weight(param, main, start, True)
        return
    for param in params:
        main = getattr(param, "main_param", param)
        if main in owners or main in offloaded:
            yield weight(param, main, 0, False)


def _sharded_mains(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield the parameters that this rank updates a part of, each with the main weight of the part.
    Megatron's own table, `model_param_group_index_map` (0.16.1), is wrong for a group with bf16 and
    fp32 parameters: the group has those in fp32 first."""
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for params, main_weights in zip(models, mains, strict=True):
            yield from zip(params, main_weights, strict=True)


@dataclass(frozen=True)
class AdamStep:
    """AdamW's settings for one step, not the configured ones. Norms and biases do not decay."""

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
    """Return the settings of a step: its own, or the configured ones."""
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


@torch.no_grad()
def apply_gradients(
    optimizer: MegatronOptimizer,
    gather: WeightGather,
    grid: RankGroups,
    device: torch.device,
    limit: float,
    deferred: Sequence[DeferredFigures],
    mtp_params: Collection[torch.nn.Parameter] = (),
) -> float:
    """Clip the gradients to a norm of at most `limit`, unless that is 0, and apply them. Return
    their norm before clipping, and read the `deferred` figures with it. Apply nothing if it is not
    finite: Megatron checks that only with a loss scaler. The `mtp_params` have a
    norm of their own, which is returned where nothing else learns or it is not finite."""
    optimizer.prepare_grads()
    mtp_grads = _main_grads(optimizer, mtp_params)
    squared = DeferredFigures(squared_norm(optimizer, grid, device, mtp_grads))

    def read_norm() -> float:
        read_together([squared, *deferred])
        norm, own_norm = (value**0.5 for value in squared.values)
        return norm if norm and math.isfinite(own_norm) else own_norm

    inner = list(inner_optimizers(optimizer))
    if is_on_device := all(map(_skips_on_device, inner)):
        _scale_on_device(inner, squared.on_device.sqrt(), limit, mtp_grads)
    else:
        norm = read_norm()
        if not math.isfinite(norm):
            return norm
        _clip(optimizer, [value**0.5 for value in squared.values], limit, mtp_grads)
    gather.finish()  # for weights that no forward waited for, e.g. without images
    optimizer.step_with_ready_grads()
    gather.start()
    if is_on_device:
        norm = read_norm()  # waits once, when all work of the step is queued
        for each in inner:
            if isinstance(each, RangedAdamW) and not math.isfinite(norm):
                each.count_step(-1)
    return norm


def _skips_on_device(inner: torch.optim.Optimizer) -> bool:
    """Return whether the device itself finds out that a step of an optimizer is to be skipped."""
    if isinstance(inner, RangedAdamW):
        return inner.kernel is not None
    on_cuda = all(each.is_cuda for group in inner.param_groups for each in group["params"])
    return isinstance(inner, torch.optim.Adam) and on_cuda  # torch's fused kernel


def _main_grads(
    optimizer: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> list[Tensor]:
    """Return the gradients of the parts of these parameters that this rank updates."""
    mains: list[Tensor] = []
    for part in optimizer.chained_optimizers if params else ():
        if isinstance(part, DistributedOptimizer):
            if not part.is_stub_optimizer:
                mains += [main for param, main in _sharded_mains(part) if param in params]
        else:
            mains += [getattr(param, "main_param", param) for param in params]
    return list({id(main): main.grad for main in mains if main.grad is not None}.values())


def _scale_on_device(
    inner: Sequence[torch.optim.Optimizer], norms_2: Tensor, limit: float, mtp_grads: list[Tensor]
) -> None:
    """Let a step clip the gradients to norms of at most `limit`, as `_clip` does, and let it skip
    them if a norm is not finite."""
    factors_2 = (limit / (norms_2 + 1e-6)).clamp(max=1) if limit > 0 else torch.ones_like(norms_2)
    skip, own = (~norms_2.isfinite().all()).int(), set(map(id, mtp_grads))
    scalings = [Scaling(factor, skip) for factor in factors_2.float()]
    for each in inner:
        params = [param for group in each.param_groups for param in group["params"]]
        of = {p: scalings[id(p.grad) in own] for p in params if p.grad is not None}
        if isinstance(each, RangedAdamW):
            each.scalings = of
            continue
        each.found_inf = skip.float()  # type: ignore[attr-defined]
        for scaling in scalings:
            if grads := [param.grad for param, own_scaling in of.items() if own_scaling is scaling]:
                torch._foreach_mul_(grads, scaling.factor)


@torch.no_grad()
def squared_norm(
    optimizer: MegatronOptimizer,
    grid: RankGroups,
    device: torch.device,
    mtp_grads: Sequence[Tensor] = (),
) -> Tensor:
    """Return the squares [2] of the norms of all other gradients, and of an MTP head, the
    same on every rank, on the device. A collective.

    If neither Transformer Engine nor Apex is installed, Megatron's own function waits for the norm
    of each tensor, one after the other."""
    parts = optimizer.chained_optimizers
    if grid.ep.size == 1:
        squared = _sum_of_squares(parts, device, mtp_grads)
        group = optimizer.get_grad_stats_parallel_group()
    else:
        # Experts and other parameters have different numbers of copies, and a stage may have no
        # experts. So all ranks add up what they hold, divided by the number of copies.
        squared, group = torch.zeros(2, device=device), dist.group.WORLD
        for part in parts:
            sharded = isinstance(part, DistributedOptimizer)
            # Megatron makes a separate optimizer for experts.
            of_experts = (group["is_expert_parallel"] for group in part.param_groups)
            copies = 1 if sharded else (grid.edp if any(of_experts) else grid.dp).size
            squared += _sum_of_squares([part], device, mtp_grads) / copies
    dist.all_reduce(squared, group=group)
    return squared


def _sum_of_squares(
    parts: Sequence[MegatronOptimizer], device: torch.device, mtp_grads: Sequence[Tensor]
) -> Tensor:
    """Return the sums [2] of the squares of this rank's other gradients, and of these."""
    grads, own = [grad for part in parts for grad in grads_for_norm(part)], set(map(id, mtp_grads))
    kinds = [[g for g in grads if id(g) not in own], [g for g in grads if id(g) in own]]
    zero = torch.zeros((), device=device)
    norms = [torch.stack(torch._foreach_norm(kind)).norm() if kind else zero for kind in kinds]
    return torch.stack(norms) ** 2


@torch.no_grad()
def _clip(
    optimizer: MegatronOptimizer, norms: Sequence[float], limit: float, mtp_grads: list[Tensor]
) -> None:
    """Scale the other gradients, and these, each to a norm of at most `limit`; 0 leaves them
    unchanged."""
    params = [param for part in optimizer.chained_optimizers for param in part.get_parameters()]
    own = set(map(id, mtp_grads))
    others = [p.grad for p in params if p.grad is not None and id(p.grad) not in own]
    for grads, norm in zip((others, mtp_grads), norms, strict=True):
        factor = limit / (norm + 1e-6)  # the same as in Megatron and torch
        if grads and limit > 0 and factor < 1:
            torch._foreach_mul_(grads, factor)
