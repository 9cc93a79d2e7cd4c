"""Small programs of two or three ranks: wrong ones, of which gloo forgives many, and a ring that is
sound. Each takes its rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Program:
    run: Callable[[int], None]
    finds: str = ""  # what the referee or a rank says
    world: int = 2
    rules: str = ""


def ring(rank: int) -> None:
    """Play a ring in a batch, each collective, and groups of one."""
    world = dist.get_world_size()
    for each in range(world):
        dist.new_group([each])
    received, flat, own = torch.empty(4), torch.empty(world), torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    mean = torch.full((2,), float(rank + 1))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    parts = [torch.empty(2) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    dist.all_gather_into_tensor(flat, torch.full((1,), float(rank)))
    dist.reduce_scatter_tensor(own, torch.arange(world).float())
    crossed = torch.empty(world)
    dist.all_to_all_single(crossed, torch.arange(world) + 10.0 * rank)
    dist.barrier()
    assert received[0] == (rank - 1) % world
    assert mean[0] == (world + 1) / 2
    assert [part[0].item() for part in parts] == flat.tolist() == list(range(world))
    assert own.item() == world * rank
    assert crossed.tolist() == [10 * other + rank for other in range(world)]


def swapped(rank: int) -> None:
    """Issue two collectives in another order on one rank."""
    parts = [torch.ones(4), torch.ones(8)]
    for part in parts[:: 1 if rank else -1]:
        dist.all_reduce(part)


def swapped_communicators(rank: int) -> None:
    """Do it on two communicators, which is safe only if both kernels fit the device together."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])][:: 1 if rank else -1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


def both_send(rank: int) -> None:
    """Send first on both ranks, unbatched."""
    works = [dist.isend(torch.ones(4), 1 - rank), dist.irecv(torch.empty(4), 1 - rank)]
    for work in works:
        work.wait()


def unequal_gather(rank: int) -> None:
    dist.all_gather([torch.empty(4 + rank) for _ in range(2)], torch.ones(4 + rank))


def unequal_send(rank: int) -> None:
    """Receive more than is sent."""
    if rank:
        dist.recv(torch.empty(8), 0)
    else:
        dist.send(torch.ones(4), 1)


def skipped(rank: int) -> None:
    """Skip a collective on one rank, which is at the next one."""
    if not rank:
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0)


def groups_in_other_order(rank: int) -> None:
    for ranks in ([0, 1], [1, 2], [0, 2])[:: -1 if rank == 2 else 1]:
        dist.new_group(ranks)


def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), rank)


def other_type(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))


def other_splits(rank: int) -> None:
    splits = [1, 3] if rank else [2, 2]
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], splits)


def read_before_wait(rank: int) -> None:
    values = torch.full((4,), 1.0 - rank)
    work = dist.broadcast(values, 0, async_op=True)
    early = values.sum().item()
    work.wait()
    assert early == 4, f"the sum is {early}"


def written_before_wait(rank: int) -> None:
    """Overwrite an input in flight."""
    if rank:
        dist.recv(torch.empty(4), 0)
    else:
        values = torch.ones(4)
        work = dist.isend(values, 1)
        values.zero_()
        work.wait()


def no_wait(rank: int) -> None:
    dist.all_reduce(torch.ones(4), async_op=True)


def not_contiguous(rank: int) -> None:
    """Reduce a transposed tensor, which gloo copies."""
    dist.all_reduce(torch.ones(4, 3).T)


def int16(rank: int) -> None:
    dist.broadcast(torch.ones(4, dtype=torch.int16), 0)


def bitwise(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.BAND)


def any_source(rank: int) -> None:
    if rank:
        dist.recv(torch.empty(4))
    else:
        dist.send(torch.ones(4), 1)


def collective_within_transfer(rank: int) -> None:
    """Issue a collective between a send and its receive, on one communicator."""
    if rank:
        dist.all_reduce(torch.ones(1))
        dist.recv(torch.empty(4), 0)
    else:
        work = dist.isend(torch.ones(4), 1)
        dist.all_reduce(torch.ones(1))
        work.wait()


def one_leaves(rank: int) -> None:
    if rank:
        dist.all_reduce(torch.ones(4))


def objects(rank: int) -> None:
    dist.all_gather_object([None, None], rank)


# What the referee or a rank says about each; nothing where a program is sound under its rules.
_ALL = (
    Program(ring, world=3),
    Program(swapped, "MISMATCH"),
    Program(swapped_communicators),
    Program(swapped_communicators, "DEADLOCK", rules="one-queue"),
    Program(both_send, "DEADLOCK"),
    Program(unequal_gather, "MISMATCH"),
    Program(unequal_send, "MISMATCH"),
    Program(skipped, "MISMATCH"),
    Program(groups_in_other_order, "GROUP ORDER", world=3),
    Program(other_root, "MISMATCH"),
    Program(other_type, "MISMATCH"),
    Program(other_splits, "MISMATCH"),
    Program(read_before_wait, "the sum is nan"),
    Program(written_before_wait, "WRITTEN IN FLIGHT"),
    Program(no_wait, "NO WAIT"),
    Program(not_contiguous, "must be contiguous"),
    Program(int16, "unconvertible NCCL type"),
    Program(bitwise, "NCCL reduces by"),
    Program(any_source, "recvAnysource"),
    Program(collective_within_transfer, "DEADLOCK"),
    Program(collective_within_transfer, rules="lazy"),
    Program(one_leaves, "STUCK"),
    Program(objects),
    Program(objects, "OBJECTS", rules="no-objects"),
)
PROGRAMS = {f"{program.run.__name__} {program.rules}".strip(): program for program in _ALL}
