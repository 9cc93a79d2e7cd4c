"""Layers of each stage for `parallel.layers_per_stage=auto`, before the model is built."""

from dataclasses import dataclass, replace

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import Platform, peak_of
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.planner.hardware import CPU, Machine, gpu
from megatron_vlm.planner.layer_split import (
    choose_layer_split,
    even_split,
    most_layers,
    replicas_of,
    step_seconds,
)
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.row_sizes import RowSample, heaviest_micro_batches

_UNKNOWN_GPU = "H100"


@dataclass(frozen=True)
class Decision:
    """Value of auto, and the reason."""

    layers: tuple[int, ...]
    text: str


def needs_auto_split(cfg: Config) -> bool:
    """Return whether the planner has to choose the layers."""
    return cfg.parallel.layers_per_stage == "auto"


def with_layers(cfg: Config, layers: tuple[int, ...]) -> Config:
    """Return the configuration with these layers in place of auto."""
    return replace(cfg, parallel=replace(cfg.parallel, layers_per_stage=list(layers)))


def decide(
    cfg: Config, sizes: ModelSizes, world: int, platform: Platform, mix: RowSample
) -> Decision:
    """Return the split with the fastest steps on rows like these. It is a pure function of its
    arguments and of the kind of device."""
    memory = platform.memory_total() if platform.is_cuda else None
    itemsize = compute_dtype(cfg, platform).itemsize
    return decide_for(cfg, sizes, world, mix, machine_of(platform), memory, itemsize)


def decide_for(
    cfg: Config,
    sizes: ModelSizes,
    world: int,
    mix: RowSample,
    machine: Machine,
    memory: float | None,
    itemsize: int,
) -> Decision:
    """Return the split with the fastest steps on devices of this speed. `memory`: bytes of a
    device, or None if it does not limit the split; `itemsize`: bytes of a weight."""
    dims = ParallelDims.create(cfg.parallel, world, sizes.text.num_layers)
    even = even_split(dims.pp, sizes.text.num_layers)
    steps = mix.steps(cfg.train, sizes, dims.dp)
    limit = None if memory is None else USABLE * memory
    max_layers = most_layers(cfg, sizes, dims, heaviest_micro_batches(steps), itemsize, limit)
    fits = max_layers is not None
    if max_layers is None:  # no split avoids running out of memory
        max_layers = (sizes.text.num_layers,) * dims.pp
    replicas = replicas_of(cfg, sizes, dims, steps, machine, itemsize)
    layers = choose_layer_split(replicas, max_layers, even)
    gain = step_seconds(replicas, even) / step_seconds(replicas, layers)
    text = (
        f"parallel.layers_per_stage=auto is {list(layers)}, by rows ({mix.origin}): predicted "
        f"steps are {gain:.2f}x as fast as with {list(even)}"
    )
    return Decision(layers, text if fits else f"{text}; no split fits into memory by the estimate")


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
