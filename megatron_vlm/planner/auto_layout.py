"""Layout for `parallel=auto`, and layers of each stage, before the model is built."""

import os
from dataclasses import replace

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.planner.advice import rank_layouts
from megatron_vlm.planner.auto_split import (
    decide,
    decide_for,
    machine_of,
    needs_auto_split,
    with_layers,
)
from megatron_vlm.planner.row_sizes import RowSample, assumed_mix
from megatron_vlm.planner.search import Candidate, Cluster, search

_UNLIMITED = 2.0**60  # bytes


def needs_planning(cfg: Config) -> bool:
    """Return whether the planner has to choose the layout, or the layers of each stage."""
    return bool(cfg.parallel.auto) or needs_auto_split(cfg)


def settle_layers(cfg: Config, sizes: ModelSizes, world: int, platform: Platform) -> Config:
    """Replace auto for a worker without a run. Such a worker has no data, so rows are assumed."""
    if not needs_planning(cfg):
        return cfg
    return plan_layout(cfg, sizes, world, platform, assumed_mix(sizes, cfg.data.max_tokens))[0]


def plan_layout(
    cfg: Config,
    sizes: ModelSizes,
    world: int,
    platform: Platform,
    mix: RowSample,
    cluster: Cluster | None = None,
) -> tuple[Config, str]:
    """Return the configuration with what the planner chooses, and a sentence about it. It is a pure
    function of its arguments and of the kind of device. `cluster` is for devices that this machine
    does not have."""
    if not cfg.parallel.auto:
        if cluster is None:
            split = decide(cfg, sizes, world, platform, mix)
        else:
            speeds, itemsize = cluster.machine, compute_dtype(cfg, platform).itemsize
            split = decide_for(cfg, sizes, world, mix, speeds, cluster.memory, itemsize)
        return with_layers(cfg, split.layers), split.text
    is_fp32 = compute_dtype(cfg, platform).itemsize == 4
    train = replace(cfg.train, precision="fp32" if is_fp32 else "bf16")
    cfg_of_search = replace(cfg, train=train)
    is_assumed = cluster is None and not platform.is_cuda
    cluster, doubt = cluster or _cluster_of(platform, world), ""
    memory = cluster.memory
    if is_assumed and not search(cfg_of_search, sizes, mix, cluster).fitting:
        # The memory of a laptop is no reason against a layout that is planned on it.
        cluster = replace(cluster, memory=_UNLIMITED)
        doubt = "; by the estimate no layout fits into the memory of this machine"
    ranked = rank_layouts(cfg_of_search, sizes, mix, cluster)
    best = ranked[0]
    text = (
        f"parallel=auto is {' '.join(best.overrides)}: the fastest of {len(ranked):,} layouts of "
        f"{world} x {cluster.machine.name}, with a predicted step of {best.step_s:.3g} s and "
        f"{best.need / 2**30:.1f} of {memory / 2**30:.1f} GiB on the fullest rank, by rows "
        f"({mix.origin}){doubt}"
    )
    return with_candidate(cfg, best), text


def with_candidate(cfg: Config, best: Candidate) -> Config:
    """Return the configuration with this layout in place of auto."""
    dims, chosen = best.dims, best.cfg
    layers = list(dims.layers_per_stage) if best.has_own_layers else None
    parallel = replace(
        cfg.parallel, auto=(), tp=dims.tp, pp=dims.pp, ep=dims.ep, layers_per_stage=layers
    )
    model = replace(
        cfg.model,
        recompute=chosen.model.recompute,
        recompute_vision=chosen.model.recompute_vision,
    )
    train = replace(cfg.train, micro_batch_tokens=chosen.train.micro_batch_tokens)
    return replace(cfg, parallel=parallel, model=model, train=train)


def with_layout_of(cfg: Config, before: Config, world: int, num_layers: int) -> Config | None:
    """Return the configuration with the layout that a run had before, or None if this number of
    processes, or a key that the user gave, needs another one."""
    values: dict[str, dict[str, object]] = {"parallel": {"auto": ()}, "model": {}, "train": {}}
    for key in cfg.parallel.auto:
        group, _, name = key.partition(".")
        values[group][name] = getattr(getattr(before, group), name)
    groups = {group: replace(getattr(cfg, group), **each) for group, each in values.items()}
    kept = replace(cfg, **groups)
    try:
        ParallelDims.create(kept.parallel, world, num_layers)
    except ConfigError:
        return None
    return kept if not before.parallel.auto else None


def _cluster_of(platform: Platform, world: int) -> Cluster:
    """Return the devices of this job. Processes on the CPU share the memory of their machine."""
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    machine, memory = machine_of(platform), float(platform.memory_total())
    if platform.is_cuda:
        return Cluster(world, memory, replace(machine, devices=local))
    return Cluster(world, memory / local, machine)
