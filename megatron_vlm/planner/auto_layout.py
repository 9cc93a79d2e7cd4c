"""Layouts for `parallel=auto` and `parallel.layers_per_stage=auto`, before a model is built; and
the micro-batches of a run's first steps, planned from the index of its data as the loader does."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from megatron_vlm.config.schema import Config, get
from megatron_vlm.data.batches.balance import Limits, plan_batch
from megatron_vlm.data.batches.dataset import DataSet, Handle, StreamSet
from megatron_vlm.data.batches.order import Position
from megatron_vlm.distributed.device import Platform, peak_of
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.planner import layer_split
from megatron_vlm.planner.advice import rank_layouts
from megatron_vlm.planner.hardware import CPU, Machine, gpu
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.memory_switches import with_keys
from megatron_vlm.planner.row_sizes import (
    BatchSizes,
    RowSample,
    Step,
    assumed_mix,
    heaviest_micro_batches,
    sizes_of_sample,
)
from megatron_vlm.planner.search import Cluster, RunPlan, search

_UNLIMITED = 2.0**60  # bytes
_UNKNOWN_GPU = "H100"


def needs_planning(cfg: Config) -> bool:
    """Return whether the planner has to choose the layout, or the layers of each stage."""
    return bool(cfg.parallel.auto) or cfg.parallel.layers_per_stage == "auto"


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
    """Return the configuration with what the planner chooses, and a sentence about it: a pure
    function of its arguments and the kind of device. `cluster`: other devices than those here."""
    if not cfg.parallel.auto:
        layers, text = decide(cfg, sizes, world, platform, mix, cluster)
        return with_layers(cfg, layers), text
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


def decide(
    cfg: Config,
    sizes: ModelSizes,
    world: int,
    platform: Platform,
    mix: RowSample,
    cluster: Cluster | None = None,
) -> tuple[tuple[int, ...], str]:
    """Return the layers of each stage with the fastest steps on such rows, and a remark."""
    itemsize = compute_dtype(cfg, platform).itemsize
    machine = machine_of(platform) if cluster is None else cluster.machine
    memory = None if cluster is None else cluster.memory
    if cluster is None and platform.is_cuda:
        memory = platform.memory_total()
    dims = ParallelDims.create(cfg.parallel, world, sizes.text.num_layers)
    even = layer_split.even_split(dims.pp, dims.num_layers)
    layout = ModelLayout(cfg, sizes, dims, itemsize, machine != CPU)
    steps = mix.steps(cfg.train, sizes, dims.dp)
    limit = None if memory is None else USABLE * memory
    max_layers = layer_split.most_layers(layout, heaviest_micro_batches(steps), limit)
    remark = ""
    if max_layers is None:  # no split avoids running out of memory
        max_layers = (sizes.text.num_layers,) * dims.pp
        remark = "; no split fits into memory by the estimate"
    replicas = layer_split.replicas_of(layout, steps, machine)
    layers = layer_split.choose_layer_split(replicas, max_layers, even)
    gain = layer_split.step_seconds(replicas, even) / layer_split.step_seconds(replicas, layers)
    return layers, (
        f"parallel.layers_per_stage=auto is {list(layers)}, by rows ({mix.origin}): predicted "
        f"steps are {gain:.2f}x as fast as with {list(even)}{remark}"
    )


def with_layers(cfg: Config, layers: tuple[int, ...]) -> Config:
    """Return the configuration with these layers in place of auto."""
    return with_keys(cfg, {"parallel.layers_per_stage": list(layers)})


def with_candidate(cfg: Config, best: RunPlan) -> Config:
    """Return the configuration with this layout in place of auto."""
    dims, chosen = best.dims, best.cfg
    layers = list(dims.layers_per_stage) if best.has_own_layers else None
    degrees = {"tp": dims.tp, "pp": dims.pp, "ep": dims.ep, "layers_per_stage": layers, "auto": ()}
    copied = ("model.recompute", "model.recompute_vision", "train.micro_batch_tokens")
    return with_keys(
        cfg,
        {f"parallel.{name}": value for name, value in degrees.items()}
        | {key: get(chosen, key) for key in copied},
    )


def with_layout_of(cfg: Config, before: Config, world: int, num_layers: int) -> Config | None:
    """Return the configuration with the layout that a run had before, or None if this number of
    processes, or a key that the user gave, needs another one."""
    values = {key: get(before, key) for key in cfg.parallel.auto}
    kept = with_keys(cfg, {**values, "parallel.auto": ()})
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


def machine_of(platform: Platform) -> Machine:
    """Return the assumed speeds of the device of this process."""
    if not platform.is_cuda:
        return CPU
    return machine_of_gpu(platform.device_name(), platform.peak_flops())


def machine_of_gpu(name: str = _UNKNOWN_GPU, peak: float | None = None) -> Machine:
    """Return the assumed speeds of a GPU with this name and peak, or of a common one."""
    peak = peak or peak_of(_UNKNOWN_GPU)
    assert peak is not None
    return gpu(name, peak)


_MAX_STEPS = 50
_MAX_ROWS = 2000  # rows of the steps that are planned, so that a run starts without delay


def plan_steps(data: DataSet | StreamSet, cfg: Config, dims: ParallelDims) -> Iterator[Step]:
    """Yield the micro-batches of each replica by step for the first epoch; nothing for a stream."""
    if not isinstance(data, DataSet):
        return
    limits = Limits.from_config(cfg.train)
    epoch = data.epoch(Position())
    while part := list(islice(epoch, cfg.train.global_batch_size)):
        rows = [_row_sizes(data, handle) for handle, _, _ in part]
        plan = plan_batch([size for _, size, _ in part], dims.dp, limits)
        yield [
            [BatchSizes.from_rows([row for n in group for row in rows[n]]) for group in share]
            for share in plan
        ]


def plan_updates(data: DataSet, cfg: Config, dims: ParallelDims) -> Iterator[Step]:
    """Yield the micro-batches of each optimizer step of rl through the first epoch of prompts.
    Every answer is assumed to have rl.max_new_tokens. Rows share no pictures here, because memory
    has to suffice for answers of uneven length, too, which are not kept together."""
    limits, answer = Limits.from_config(cfg.train), cfg.rl.max_new_tokens
    epoch = data.epoch(Position())
    prompts = -(-cfg.train.global_batch_size // cfg.rl.updates)
    while part := list(islice(epoch, prompts)):
        rows = [
            replace(row, tokens=row.tokens + answer, supervised=answer)
            for row in itertools.chain(*(_row_sizes(data, handle) for handle, _, _ in part))
            for _ in range(cfg.rl.samples)
        ]
        sizes = ((row.tokens, row.supervised, row.patches, row.patch_pairs) for row in rows)
        plan = plan_batch([data.work.row_size(*each) for each in sizes], dims.dp, limits)
        yield [[BatchSizes.from_rows([rows[n] for n in group]) for group in g] for g in plan]


def plan_run(layout: ModelLayout, data: DataSet | StreamSet, prompts_only: bool = False) -> RunPlan:
    """Return the plan of a run, estimated from its first steps, or for a stream from assumed rows.
    With `prompts_only` the samples are prompts, whose answers are trained."""
    cfg, dims = layout.cfg, layout.dims
    count = min(_MAX_STEPS, max(1, _MAX_ROWS // cfg.train.global_batch_size))
    if prompts_only and isinstance(data, DataSet):
        steps = list(islice(plan_updates(data, cfg, dims), max(1, count // cfg.rl.samples)))
    else:
        steps = list(islice(plan_steps(data, cfg, dims), count))
    mix = assumed_mix(layout.sizes, cfg.data.max_tokens)
    steps = steps or mix.steps(cfg.train, layout.sizes, dims.dp)
    return RunPlan.of(layout, heaviest_micro_batches(steps))


def _row_sizes(data: DataSet, handle: Handle) -> list[BatchSizes]:
    return [sizes_of_sample(sample) for sample in data.example(handle)]
