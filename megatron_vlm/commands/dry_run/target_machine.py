"""The machine that a dry run plans for: this one, or GPUs that it does not have."""

import os
from dataclasses import dataclass

import torch

from megatron_vlm.commands.plan.plan_arguments import parse_memory
from megatron_vlm.config.checks import processes_for
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import Platform, count_gpus, pick_platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import size_text
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.planner.auto_layout import machine_of_gpu
from megatron_vlm.planner.search import Cluster

MAX_GPUS = 4096
COMMON_MEMORY = 80.0 * 2**30  # bytes
_GPU = Platform("cuda", torch.device("cuda", 0), "nccl", torch.bfloat16)


@dataclass(frozen=True)
class TargetMachine:
    """The device of each process, and the number of processes."""

    platform: Platform
    gpus: int  # 0 on the CPU, and where their number is open
    memory: float | None  # bytes of a GPU, or of this machine on the CPU; None: not known

    @property
    def is_here(self) -> bool:
        """True if the run is planned for this machine."""
        return self.platform is not _GPU

    @property
    def available(self) -> str:
        """The memory in words; empty if it is not known."""
        if self.memory is None:
            return ""
        return f"{size_text(self.memory)} in {'a GPU' if self.platform.is_cuda else 'this machine'}"

    def words(self, cfg: Config) -> str:
        """Return the kind of device and the type of weights in words."""
        return f"{self.platform.name}, {compute_dtype(cfg, self.platform)}"

    def cluster(self, world: int) -> Cluster | None:
        """Return the GPUs that this machine does not have, or None if it is this machine. Memory
        that is not known is that of a common GPU."""
        if self.is_here:
            return None
        return Cluster(world, self.memory or COMMON_MEMORY, machine_of_gpu())

    def world(self, cfg: Config) -> int:
        """Return the number of processes of the job."""
        return int(os.environ.get("WORLD_SIZE", "0")) or processes_for(cfg, self.gpus)


def target_machine(
    cfg: Config, parameters: int, gpus: int | None = None, memory: str | None = None
) -> TargetMachine:
    """Return the machine to plan for. Without --gpus and --memory it is this one, except for a
    model of real size where there is no GPU and nobody chose the CPU: its run is planned for GPUs
    of unknown memory."""
    if gpus is None and memory is None:
        here = pick_platform(cfg.platform)
        if here.is_cuda:
            return TargetMachine(here, count_gpus(), here.memory_total())
        if here.remark(cfg.platform, parameters) is not None:
            return TargetMachine(_GPU, 0, None)
        return TargetMachine(here, 0, here.memory_total())
    if cfg.platform == "cpu":
        key, found = ("--gpus", gpus) if gpus is not None else ("--memory", memory)
        raise ConfigError(
            "is about GPUs, and platform=cpu", key=key, found=found, remedy="change one of them"
        )
    if gpus is not None and not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(key="--gpus", found=gpus, allowed=range(1, MAX_GPUS + 1))
    if gpus is not None and cfg.launch.processes not in (None, gpus):
        raise ConfigError(
            f"is another number than launch.processes={cfg.launch.processes}: there is one "
            "process for each GPU",
            key="--gpus",
            found=gpus,
            remedy="leave one of them out",
        )
    return TargetMachine(_GPU, gpus or 0, None if memory is None else parse_memory(memory))
