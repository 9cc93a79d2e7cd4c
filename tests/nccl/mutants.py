"""Mutants of the trainer: mistakes that a change could make, each of which breaks a rule of NCCL.
Many of them pass with gloo, or hang."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.training import data_parallel, optimizer_step
from megatron_vlm.training.data_parallel import GradReduce, WeightGather
from megatron_vlm.training.pipeline import KnownShapeP2P, Stage
from megatron_vlm.training.worker import MegatronWorker

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A change of the program, the layout in which it matters (a name of test_mutants.LAYOUTS), and
    the rule that it breaks."""

    put_in: Callable[[Patch], None]
    layout: str
    finds: str


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _tower_grads(model: Any) -> list[Tensor]:
    return [param.main_grad for param in model.vision_model.parameters() if param.requires_grad]


def swapped_collectives(patch: Patch) -> None:
    """Sum the tower's gradients in another order on the last rank."""

    def all_reduce_tower_grads(model: Any, tp: Any) -> None:
        for grad in _tower_grads(model)[:: -1 if _is_last() else 1]:
            dist.all_reduce(grad, group=tp.group)

    patch.setattr(data_parallel, "all_reduce_tower_grads", all_reduce_tower_grads)


def written_in_flight(patch: Patch) -> None:
    """Scale the tower's gradients before their sums have arrived."""

    def all_reduce_tower_grads(model: Any, tp: Any) -> None:
        grads = _tower_grads(model)
        works = [dist.all_reduce(grad, group=tp.group, async_op=True) for grad in grads]
        torch._foreach_mul_(grads, 0.5)
        for work in works:
            work.wait()

    patch.setattr(data_parallel, "all_reduce_tower_grads", all_reduce_tower_grads)


def skipped_all_reduce(patch: Patch) -> None:
    """Compute no norm of the gradients on the last rank."""
    norm = optimizer_step.squared_norm

    def squared_norm(*args: Any) -> Tensor:
        return torch.ones(2) if _is_last() else norm(*args)

    patch.setattr(optimizer_step, "squared_norm", squared_norm)


def other_type(patch: Patch) -> None:
    """Add the squares up in fp64 on the last rank."""
    squares = optimizer_step._sum_of_squares

    def sum_of_squares(*args: Any) -> Tensor:
        return squares(*args).double() if _is_last() else squares(*args)

    patch.setattr(optimizer_step, "_sum_of_squares", sum_of_squares)


def leaves_early(patch: Patch) -> None:
    """End the last rank before its first step of the optimizer."""
    step = MegatronWorker.optim_step

    def optim_step(self: MegatronWorker, *args: Any) -> Any:
        if _is_last():
            raise SystemExit
        return step(self, *args)

    patch.setattr(MegatronWorker, "optim_step", optim_step)


def other_source(patch: Patch) -> None:
    """Broadcast from the first stage on the last rank."""
    broadcast = RankGroups.from_last_stage

    def from_last_stage(self: RankGroups, tensor: Tensor) -> None:
        if _is_last():
            source = dist.get_process_group_ranks(self.pp.group)[0]
            dist.broadcast(tensor, source, group=self.pp.group)
        else:
            broadcast(self, tensor)

    patch.setattr(RankGroups, "from_last_stage", from_last_stage)


def own_sizes(patch: Patch) -> None:
    """Receive by the sizes of other micro-batches on the last rank."""
    init = KnownShapeP2P.__init__

    def other_init(self: Any, grid: Any, config: Any, sizes: Any, batches: Any, *rest: Any) -> None:
        init(self, grid, config, sizes, batches[:: -1 if _is_last() else 1], *rest)

    patch.setattr(KnownShapeP2P, "__init__", other_init)


def unbatched_sends(patch: Patch) -> None:
    """Send and receive one by one, so that a send waits for its receive."""

    def batch_isend_irecv(ops: Sequence[dist.P2POp]) -> list[Any]:
        return [op.op(op.tensor, op.peer, op.group) for op in ops]

    patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)


def groups_in_other_order(patch: Patch) -> None:
    """Make the groups of the pipelines in another order on the last rank."""
    make = dist.new_subgroups_by_enumeration

    def new_subgroups(ranks: list[list[int]], **options: Any) -> Any:
        return make(ranks[:: -1 if _is_last() else 1], **options)

    patch.setattr(dist, "new_subgroups_by_enumeration", new_subgroups)


def order_of_backward(patch: Patch) -> None:
    """Reduce gradients as soon as they are complete, in an order that depends on the images."""

    def add(self: GradReduce, group: Any, force_all_reduce: bool = False) -> None:
        if group not in self.complete:
            self.complete.add(group)
            self.begin[group](force_all_reduce=force_all_reduce)

    patch.setattr(GradReduce, "_add", add)


def own_number_of_passes(patch: Patch) -> None:
    """Play only the own micro-batches, beside replicas that share the experts and have more."""
    patch.setattr(Stage, "global_max", lambda self, count: count)


def weights_without_wait(patch: Patch) -> None:
    """Use weights before they have arrived."""
    patch.setattr(WeightGather, "_wait", lambda self, groups: self.pending.clear())


def gradients_without_wait(patch: Patch) -> None:
    """Use gradients before their sums have arrived."""

    def finish_grad_sync(self: Any, *_: Any, **__: Any) -> None:
        self.grad_reduce_handle = None

    patch.setattr(_ParamAndGradBucketGroup, "finish_grad_sync", finish_grad_sync)


def _at_third_step(patch: Patch, rank: int, lose: Callable[[], None]) -> None:
    """Lose one rank while the others are on their way to a collective."""
    right, calls = MegatronWorker.optim_step, itertools.count(1)

    def optim_step(self: MegatronWorker, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3 and dist.get_rank() == rank:
            lose()
        return right(self, *args, **kwargs)

    patch.setattr(MegatronWorker, "optim_step", optim_step)


def _fail() -> None:
    raise OSError("this machine has lost its disk")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def last_hangs(patch: Patch) -> None:
    """Let one rank wait for nothing, after the gradients of the third step."""
    begin = Watchdog.begin_phase

    def begin_phase(self: Watchdog, step: int, phase: str, files: bool = False) -> None:
        if (self.rank, step, phase) == (1, 3, "optimizer"):
            threading.Event().wait()
        begin(self, step, phase, files)

    patch.setattr(Watchdog, "begin_phase", begin_phase)


# A rank that is lost breaks no rule: what do the others do?
LOST = {
    "first_fails": partial(_at_third_step, rank=0, lose=_fail),
    "last_fails": partial(_at_third_step, rank=1, lose=_fail),
    "last_dies": partial(_at_third_step, rank=1, lose=_die),
    "last_stops": partial(_at_third_step, rank=1, lose=_stop),
    "last_hangs": last_hangs,
}


MUTANTS = {
    mutant.put_in.__name__: mutant
    for mutant in (
        Mutant(swapped_collectives, "tp2", "MISMATCH"),
        Mutant(written_in_flight, "tp2", "WRITTEN IN FLIGHT"),
        Mutant(skipped_all_reduce, "dp2", "DEADLOCK"),
        Mutant(other_type, "dp2", "MISMATCH"),
        Mutant(leaves_early, "dp2", "STUCK"),
        Mutant(other_source, "pp2", "MISMATCH"),
        Mutant(own_sizes, "pp2", "MISMATCH"),
        Mutant(unbatched_sends, "pp2x2", "DEADLOCK"),
        Mutant(groups_in_other_order, "pp2-dp2", "GROUP ORDER"),
        Mutant(order_of_backward, "dp2-overlap", "MISMATCH"),
        Mutant(own_number_of_passes, "ep2", "DEADLOCK"),
        Mutant(weights_without_wait, "dp2-overlap", "the norm is nan"),
        Mutant(gradients_without_wait, "dp2-overlap", "NO WAIT"),
    )
}


def put_in(name: str) -> None:
    """Break the trainer of this process for good."""
    every = LOST | {mutant: MUTANTS[mutant].put_in for mutant in MUTANTS}
    every[name](Patch())
