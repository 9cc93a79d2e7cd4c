"""Host memory that the ranks of a machine need, and the refusal of a run that needs more than there
is."""

from collections.abc import Sequence

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.memory import USABLE, StageMemory, estimate

_GIB = 2**30


def host_need(dims: ParallelDims, stages: Sequence[StageMemory], devices: int) -> int:
    """Return the bytes that the ranks of the fullest machine need. A machine has so many
    neighbouring ranks."""
    of_rank = [stages[dims.stage_of(rank)].host for rank in range(dims.world_size)]
    return max(sum(of_rank[first:][:devices]) for first in range(0, len(of_rank), devices))


def check_offload(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, itemsize: int, devices: int, memory: float
) -> None:
    """Refuse an offloaded optimizer that needs more than the memory of a machine, which has so many
    devices. `itemsize`: bytes of a weight."""
    if not cfg.optim.offload:
        return
    need = host_need(dims, estimate(cfg, sizes, dims, [], itemsize), devices)
    if need > USABLE * memory:
        ranks = min(devices, dims.world_size)
        raise ConfigError(
            f": main weights and moments of {ranks} rank{'s' * (ranks > 1)} need "
            f"{need / _GIB:,.1f} GiB of host memory, and {USABLE:.0%} of the {memory / _GIB:,.1f} "
            "GiB of their machine can be used",
            key="optim.offload",
            found=cfg.optim.offload,
            remedy="lower it, set optim.states=int8, or use more machines with "
            "parallel.distributed_optimizer=true",
        )
