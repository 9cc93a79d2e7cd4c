"""Place of this process among all ranks, and the end of its groups. Nothing else reads Megatron's
parallel_state."""

import contextlib
import datetime
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_vlm.distributed.collectives import host_group
from megatron_vlm.distributed.dims import ParallelDims, ShardGroup
from megatron_vlm.errors import ConfigError

_LOOK_S = 0.01
_QUIET_LOOKS = 3
_MOST_LOOKS = 500


@dataclass(frozen=True)
class GroupAxis:
    """Rank of this process in a group of processes that share one kind of work."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class RankGroups:
    """Layout and the place of this process in it. `create` builds the process groups."""

    dims: ParallelDims
    rank: int  # rank in the whole job
    tp: GroupAxis
    pp: GroupAxis  # its rank is the pipeline stage
    dp: GroupAxis  # its rank is the data parallel replica
    replica: GroupAxis  # the TP x PP ranks of one replica; the first of them loads its data
    ep: GroupAxis  # the replicas that divide the experts of this stage
    edp: GroupAxis  # the replicas that hold the same experts
    tp_dp: GroupAxis  # all ranks of this stage: TP ranks of every replica
    p2p: dist.ProcessGroup  # ranks of `pp`, for messages between stages alone
    replica_hosts: dist.ProcessGroup  # ranks of `replica`, from host to host over gloo

    @staticmethod
    def create(dims: ParallelDims, seed: int, timeout_minutes: float) -> "RankGroups":
        """Create Megatron's process groups in an initialised torch.distributed world. If another
        worker of this process has created groups already, they must have the same layout."""
        if parallel_state.model_parallel_is_initialized():
            _check_same_groups(dims)
        else:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=dims.tp,
                pipeline_model_parallel_size=dims.pp,
                virtual_pipeline_model_parallel_size=(
                    dims.virtual_stages if dims.virtual_stages > 1 else None
                ),
                expert_model_parallel_size=dims.ep,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=timeout_minutes,
            )
            model_parallel_cuda_manual_seed(seed)
        grid = RankGroups(
            dims,
            dist.get_rank(),
            _axis(parallel_state.get_tensor_model_parallel_group()),
            _axis(parallel_state.get_pipeline_model_parallel_group()),
            _axis(parallel_state.get_data_parallel_group()),
            _axis(parallel_state.get_model_parallel_group()),
            _axis(parallel_state.get_expert_model_parallel_group()),
            _axis(parallel_state.get_expert_data_parallel_group()),
            _axis(parallel_state.get_tensor_and_data_parallel_group()),
            _p2p_group(dims, timeout_minutes),
            _replica_hosts(dims, timeout_minutes),
        )
        place = (dims.tp_rank_of(grid.rank), dims.stage_of(grid.rank), dims.replica_of(grid.rank))
        assert place == (grid.tp.rank, grid.pp.rank, grid.dp.rank), (
            "Megatron orders ranks otherwise"
        )
        return grid

    @property
    def first(self) -> bool:
        """True for the first pipeline stage, which has the vision tower."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True for the last pipeline stage, which has the head."""
        return self.pp.rank == self.pp.size - 1

    @property
    def leads(self) -> bool:
        """True if this process loads the data of its replica and reports its results."""
        return self.replica.rank == 0

    def along(self, shard_group: ShardGroup | None) -> tuple[int, int]:
        """Return (rank, size) among the processes that a parameter is sharded over, or (0, 1)."""
        axis = self.axis_of(shard_group)
        return (0, 1) if axis is None else (axis.rank, axis.size)

    def axis_of(self, shard_group: ShardGroup | None) -> GroupAxis | None:
        """Return the processes that a parameter is sharded over, or None for a whole one."""
        return {None: None, "tp": self.tp, "ep": self.ep}[shard_group]

    def gather(self, shard_group: ShardGroup | None, local: Tensor) -> list[Tensor]:
        """Gather the parts of a parameter from all ranks that it is sharded over. A collective."""
        if (axis := self.axis_of(shard_group)) is None:
            return [local]
        parts = [local.new_empty(local.shape) for _ in range(axis.size)]
        dist.all_gather(parts, local, group=axis.group)
        return parts

    def from_last_stage(self, tensor: Tensor) -> None:
        """Broadcast the last stage's values to all stages, in place."""
        source = dist.get_process_group_ranks(self.pp.group)[-1]
        dist.broadcast(tensor, source, group=self.pp.group)

    def sum_of_replicas(self, *values: float) -> list[float]:
        """Return sums over the replicas of numbers that the hosts know. A collective of all hosts,
        during which the devices compute."""
        total = torch.tensor(values if self.leads else [0.0] * len(values), dtype=torch.float64)
        dist.all_reduce(total, group=host_group())
        sums: list[float] = total.tolist()
        return sums

    def broadcast_from_head(self, tensor: Tensor) -> None:
        """Broadcast the values of the first rank of the last stage to the replica, in place."""
        ranks = dist.get_process_group_ranks(self.replica.group)
        source = next(rank for rank in ranks if self.dims.stage_of(rank) == self.pp.size - 1)
        dist.broadcast(tensor, source, group=self.replica.group)

    @property
    def leader(self) -> int:
        """Rank in the whole job that leads this replica."""
        return dist.get_process_group_ranks(self.replica.group)[0]


def leave_world(has_failed: bool | None = None) -> None:
    """End the groups of this process. If it `has_failed`, by default with an error that nobody
    caught, they end with the process, since others may be waiting for it in a collective.

    gloo's threads free the tensors of a collective after its caller has gone on. A thread that does
    so while the interpreter ends would abort the process, so the threads get their time here.
    """
    if is_at_exit := has_failed is None:
        has_failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and not has_failed:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    looks = quiet = 0
    while quiet < _QUIET_LOOKS and looks < _MOST_LOOKS:
        time.sleep(_LOOK_S)
        looks, quiet = looks + 1, 0 if _is_gloo_running() else quiet + 1
    if is_at_exit and has_failed:
        end_with_nccl(1)  # as Python ends after an error that nobody caught


def end_with_nccl(status: int) -> None:
    """End this failed process at once if it has groups of NCCL. Their destructors wait for the
    kernels of collectives, which may wait for a rank that has ended."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_gloo_running() -> bool:
    """Return whether a thread of gloo is running, or waits for a processor, on Linux."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            name, _, state = stat.read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_gloo") and state.startswith("R"):
                return True
    return False


def _axis(group: dist.ProcessGroup) -> GroupAxis:
    return GroupAxis(dist.get_rank(group), dist.get_world_size(group), group)


def _p2p_group(dims: ParallelDims, timeout_minutes: float) -> dist.ProcessGroup:
    """Return a new group of this pipeline. gloo counts messages like collectives, and stages send
    unequally many: under TORCH_DISTRIBUTED_DEBUG=DETAIL, torch would refuse the next collective of
    a group that has sent any."""
    if dims.pp == 1:
        return parallel_state.get_pipeline_model_parallel_group()
    timeout, width = datetime.timedelta(minutes=timeout_minutes), dims.tp * dims.dp
    pipelines = [list(range(first, dims.world_size, width)) for first in range(width)]
    return dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, group_desc="P2P_GROUP")[0]


def _replica_hosts(dims: ParallelDims, timeout_minutes: float) -> dist.ProcessGroup:
    """Return a new group of this replica: what its first rank loads is for the others' hosts."""
    if dims.tp * dims.pp == 1:
        return parallel_state.get_model_parallel_group()
    ranks, timeout = range(dims.world_size), datetime.timedelta(minutes=timeout_minutes)
    replicas = [[r for r in ranks if dims.replica_of(r) == replica] for replica in range(dims.dp)]
    return dist.new_subgroups_by_enumeration(
        replicas, timeout=timeout, backend="gloo", group_desc="REPLICA_HOST_GROUP"
    )[0]


def _check_same_groups(dims: ParallelDims) -> None:
    there = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "virtual_stages": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    }
    wanted: dict[str, int] = {name: getattr(dims, name) for name in there}
    if there != wanted:
        layout, present = (
            ", ".join(f"{name}={degree}" for name, degree in degrees.items())
            for degrees in (wanted, there)
        )
        name = next(name for name, degree in wanted.items() if degree != there[name])
        raise ConfigError(
            f": the layout is {layout}, but this process has a worker with {present}, and all "
            "workers of a process share its groups",
            key=f"parallel.{name}",
            found=wanted[name],
            remedy="give both one layout, or start the second in processes of its own",
        )
