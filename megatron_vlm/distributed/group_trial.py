"""A trial of process groups by ranks without a model: what a run sends, over gloo or NCCL."""

import datetime
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.distributed.device import memory_outside, pick_platform
from megatron_vlm.distributed.job_store import stay_on_this_machine

_GIB = 2**30


def try_as_rank() -> None:
    """Run the trial as one rank; rank 0 prints a summary. An error is one line, the last."""
    store, rank, seconds, world, backend = sys.argv[1:6]
    print(try_groups(store, int(rank), int(world), float(seconds), backend))


def try_groups(store: str, rank: int, world: int, timeout_s: float, backend: str) -> str:
    """Try each kind of operation of a run with the other ranks, and return a summary."""
    os.environ["LOCAL_RANK"] = str(rank)
    platform = pick_platform("cuda" if backend == "nccl" else "cpu")
    stay_on_this_machine()  # as a job of one machine does
    before, began = memory_outside(platform), time.monotonic()
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    pairs = [list(range(first, min(first + 2, world))) for first in range(0, world, 2)]
    split = dist.new_subgroups_by_enumeration(pairs)[0]
    trials: dict[str, Callable[[Tensor], float]] = {
        "all-reduce": lambda x: _all_reduce(x, None, world),
        "ring": lambda x: _ring(x, rank, world),
        "pair": lambda x: _pair(x, rank),
        "split": lambda x: _all_reduce(x, split, split.size()),
    }
    for name, trial in trials.items():
        if (got := trial(torch.ones(1024, device=platform.device))) != 1:
            sys.exit(f"{name}: 1 came out as {got:g}")
    seconds, more = time.monotonic() - began, memory_outside(platform) - before
    dist.destroy_process_group()
    memory = f", {more / _GIB:.1f} GiB of a GPU outside torch" if platform.is_cuda else ""
    return f"{world} processes: {', '.join(trials)} in {seconds:.1f} s{memory}"


def _all_reduce(x: Tensor, group: dist.ProcessGroup | None, size: int) -> float:
    dist.all_reduce(x, group=group)
    return float(x.mean()) / size


def _ring(x: Tensor, rank: int, world: int) -> float:
    """Send to the next rank and receive from the previous one in one batch, as stages do."""
    received = torch.zeros_like(x)
    moves = [(dist.isend, x, (rank + 1) % world), (dist.irecv, received, (rank - 1) % world)]
    for work in dist.batch_isend_irecv([dist.P2POp(*move) for move in moves]):
        work.wait()
    return float(received.mean())


def _pair(x: Tensor, rank: int) -> float:
    """Send from rank 0 to rank 1 outside a batch, which has a communicator of its own in NCCL."""
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x.zero_(), 0)
    return float(x.mean())
