"""Building of the optimizer. data_parallel.py reduces its gradients, and optimizer_step.py clips
them and runs the step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import nn

from megatron_vlm.config.optimizer_spec import STATE_NAMES, OptimizerSpec, optimizer_spec
from megatron_vlm.config.schema import Config, OptimConfig
from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.dims import overlaps, shards_optimizer
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import error_line
from megatron_vlm.family.spec import Part
from megatron_vlm.hf.weight_map import Entry
from megatron_vlm.training import optimizer_step
from megatron_vlm.training.adamw import Kernel, RangedAdamW
from megatron_vlm.training.muon import use_muon
from megatron_vlm.training.offload import MainsWithoutMemory, offload_optimizer


def build_optimizer(
    cfg: Config,
    chunks: Sequence[DistributedDataParallel],
    entries: Mapping[nn.Parameter, Entry],
    grid: RankGroups,
) -> MegatronOptimizer:
    """Build the optimizer with fp32 main weights, whose state parallel.distributed_optimizer shards
    over DP. `entries` has each parameter's place in the table of names. A collective."""
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
        use_distributed_optimizer=shards_optimizer(cfg.parallel, grid.dp.size),
        overlap_param_gather=overlaps(cfg.parallel, grid.dp.size)[1],
    )
    overrides = {**get_standard_config_overrides(config), **_part_overrides(optim, parts)}
    with MainsWithoutMemory() if optim.offload else nullcontext(), _gathers_json():
        optimizer = get_megatron_optimizer(
            config, list(chunks), config_overrides=overrides, use_gloo_process_groups=False
        )
    optimizer_step.set_adam(optimizer, optimizer_step.AdamStep.from_config(optim))
    kernel = choose_adamw_kernel(spec.states, next(iter(entries)).device)
    if spec.states == "fp32":
        for group in optimizer.param_groups:
            if "foreach" in group:  # torch's AdamW: neither TE nor Apex provides a fused one
                group["fused"] = True
    if optim.offload:
        offload_optimizer(optimizer, list(entries), optim.offload, spec, kernel)
    elif spec.states != "fp32" or kernel is not None:
        for chained in optimizer.chained_optimizers:
            if chained.is_stub_optimizer:
                continue
            weights = list(optimizer_step.main_weights_of(chained, list(entries)))
            # The groups stay the same objects, because Megatron's optimizers keep them as well.
            groups = chained.optimizer.param_groups
            chained.optimizer = optimizer_step.ranged_adamw(groups, weights, spec, kernel)
            if kernel is not None:  # it has written them
                chained._copy_main_params_to_model_params = partial(
                    optimizer_step.copy_to_model, []
                )
    if spec.matrix_state_names:
        use_muon(optimizer, optim, entries, grid)
    return optimizer


_TRIED_WEIGHTS = 5000  # the last block is not full
_MAX_DISTANCE = 1e-3  # relative to the norm: a code of 8 bits may be the next one


def choose_adamw_kernel(states: str, device: torch.device) -> Kernel | None:
    """Return the kernel that updates moments of this type, or None where there is none. A
    collective on CUDA: all ranks take the same."""
    if device.type != "cuda":
        return None
    reason = "Triton is not installed"
    if find_spec("triton") is not None:
        try:
            from megatron_vlm.training.fused_adamw import fused_step

            distance = _distance(fused_step, states, device)
            reason = "" if distance < _MAX_DISTANCE else f"its weights are {distance:.1e} apart"
        except Exception as error:  # a kernel that does not compile may raise anything
            reason = error_line(error)
    if not all_reduce_max(int(reason != "")):
        return fused_step
    if dist.get_rank() == 0:
        reason = reason or "another rank cannot run its kernel"
        print_to_user(f"AdamW takes several kernels a step, and longer: {reason}")
    return None


def _distance(kernel: Kernel, states: str, device: torch.device) -> float:
    """Return how far apart weights are after two steps with the kernel and without it."""
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(_TRIED_WEIGHTS, generator=generator).to(device) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    found = []
    for tried in (None, kernel):
        weights = start.clone()
        weights.grad = grad
        spec = OptimizerSpec("AdamW", STATE_NAMES, states)
        optimizer = RangedAdamW([{"params": [weights], **settings}], spec, {weights: 7}, tried)
        optimizer.step()
        optimizer.step()
        found.append(weights)
    return float((found[1] - found[0]).norm() / found[0].norm())


@contextmanager
def _gathers_json() -> Iterator[None]:
    """Let Megatron gather the keys of parameter groups as JSON during the body, not as pickles."""
    original = vars(dist)["all_gather_object"]

    def all_gather(values: list[Any], value: Any) -> None:
        values[:] = [[_as_tuples(key) for key in keys] for keys in all_gather_json(value)]

    vars(dist)["all_gather_object"] = all_gather
    try:
        yield
    finally:
        vars(dist)["all_gather_object"] = original


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


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
