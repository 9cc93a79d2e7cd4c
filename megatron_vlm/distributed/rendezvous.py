"""Rendezvous of the ranks of a job, also after a restart."""

import atexit
import datetime
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_vlm.distributed import job_store
from megatron_vlm.distributed.collectives import make_host_group
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.grid import leave_world
from megatron_vlm.distributed.process import SECRET
from megatron_vlm.errors import MegatronVLMError

_POLL_S = 0.01
_LAST_WORDS_S = 0.5
_WORLD, _PLACE = "megatron-vlm-world", "megatron-vlm-rank"  # keys independent of the job's secret
T = TypeVar("T")


class MeetingError(MegatronVLMError):
    """A rank did not join."""


def join_world(platform: Platform, minutes: float) -> bool:
    """Join torch.distributed by torchrun's variables, or alone without them. Return False if this
    process has joined already. No collective, nor the wait for other ranks, lasts longer than
    `minutes`. The groups end with the program at the latest."""
    if dist.is_initialized():
        make_host_group()
        return False
    timeout = datetime.timedelta(minutes=minutes)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        _join(platform, rank, world, minutes, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise MeetingError(
            f"it could not meet the others{meeting_place()}: {str(error).splitlines()[0]}",
            place=f"rank {rank} of {world}",
            remedy="check that rank 0 is there, that no other job or program has this port (else "
            f"give this job another MASTER_PORT), and that all ranks have WORLD_SIZE={world}",
        ) from error
    atexit.unregister(leave_world)  # another worker's
    atexit.register(leave_world)
    return True


def _join(
    platform: Platform, rank: int, world: int, minutes: float, timeout: datetime.timedelta
) -> None:
    store: Any = dist.HashStore()
    is_local = job_store.stay_on_this_machine()
    if world > 1:
        store = _join_in_time(minutes, lambda: _open_store(rank, is_local, timeout))
        store.set_timeout(timeout)
        if not _launcher_has_store():
            _take_place(store, rank, world)
        store = of_this_attempt(job_store.part_of_job(store), rank, world)
    dist.init_process_group(
        platform.dist_backend, store=store, rank=rank, world_size=world, timeout=timeout
    )
    make_host_group()


def _open_store(rank: int, here: bool, timeout: datetime.timedelta) -> Any:
    """Return the launcher's store, or one that rank 0 opens."""
    port = int(os.environ.get("MASTER_PORT", "0"))
    if not here or not port or _launcher_has_store():
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    if rank == 0:
        return job_store.listen_at(job_store.LOOPBACK, port, timeout)
    return dist.TCPStore(job_store.LOOPBACK, port, timeout=timeout)


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _take_place(store: Any, rank: int, world: int) -> None:
    """Claim this rank at a store that lives as long as rank 0. A second process with the same rank
    belongs to another job, whose own rank 0 could not listen and would never reply."""
    if rank == 0:
        store.set(_WORLD, str(world))
    world_of_rank0 = store.get(_WORLD)
    if world_of_rank0.isdigit() and rank >= int(world_of_rank0):
        raise _disagree(rank, world, 0, int(world_of_rank0))
    if store.add(f"{_PLACE}-{rank}", 1) > 1:
        raise MeetingError(
            f"is taken in the job{meeting_place()}, so this is another job, or both processes "
            "were started with the same RANK",
            key="RANK",
            found=rank,
            remedy="give each job a MASTER_PORT of its own",
        )


def _join_in_time(minutes: float, join: Callable[[], T]) -> T:
    """Return the result of `join`. torch's time-outs do not cover an address that accepts a
    connection and sends nothing (seen with torch 2.13). A thread that waits there is abandoned."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(join())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], 60 * minutes).done:
        raise MeetingError(
            f"it has not answered{meeting_place()} in {minutes:g} minutes",
            place="rank 0",
            remedy="check that it is there, and that no other program has this port",
        )
    return result.result()


def meeting_place() -> str:
    """Return the address where the ranks meet, for messages; an empty text for a rank alone."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    return " at {}:{}".format(*map(os.environ.get, names)) if "RANK" in os.environ else ""


def of_this_attempt(store: Any, rank: int, world: int) -> Any:
    """Return a part of the store that no earlier attempt of the job has written to.

    torchrun keeps one store for all attempts, in which torch reads addresses of processes that no
    longer exist: every restart fails (pytorch issues 135712 and 167288; seen with torch 2.13 and
    gloo). torchrun's own count of restarts does not tell attempts apart, as each machine counts for
    itself. So rank 0 names the attempt and sends the name to the ranks that are present.
    """
    board, deadline = job_store.SignedStore(store), time.monotonic() + store.timeout.total_seconds()
    if rank == 0:
        attempt = uuid.uuid4().hex
        for other in range(1, world):
            _write_until_acknowledged(board, other, attempt, deadline, world)
    else:
        token = uuid.uuid4().hex
        board.write(f"joined/{rank}", token)
        attempt, _, world_of_rank0 = _wait_for_value(
            board, f"attempt-of/{token}", deadline
        ).partition(" ")
        board.write(f"told/{attempt}/{rank}", str(world))
        if int(world_of_rank0) != world:
            raise _disagree(rank, world, 0, int(world_of_rank0))
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _write_until_acknowledged(
    board: job_store.SignedStore, other: int, attempt: str, until: float, world: int
) -> None:
    """Send the attempt until it is acknowledged: the first process to join may belong to the
    previous attempt."""
    while (world_of_other := board.read(f"told/{attempt}/{other}")) is None:
        if (token := board.read(f"joined/{other}")) is not None:
            board.write(f"attempt-of/{token}", f"{attempt} {world}")
        if time.monotonic() > until:
            raise _missing_rank_error(other)
        time.sleep(_POLL_S)
    if int(world_of_other) != world:
        time.sleep(_LAST_WORDS_S)  # the store may end with this process before the other rank reads
        raise _disagree(0, world, other, int(world_of_other))


def _wait_for_value(board: job_store.SignedStore, key: str, until: float) -> str:
    """Return the text that rank 0 writes to a key. Many ranks wait for it, so the store notifies
    them. Values that somebody else wrote meanwhile are ignored."""
    while True:
        remaining = datetime.timedelta(seconds=max(_POLL_S, until - time.monotonic()))
        try:
            board.store.wait([key], remaining)
        except dist.DistStoreError:
            raise _missing_rank_error(0) from None
        if (text := board.read(key)) is not None:
            return text
        if time.monotonic() > until:
            raise _missing_rank_error(0)
        time.sleep(_POLL_S)


def _missing_rank_error(rank: int) -> MeetingError:
    return MeetingError(
        f"it did not join{meeting_place()}",
        place=f"rank {rank}",
        remedy=f"check its logs, that all ranks have the same WORLD_SIZE, and one {SECRET}",
    )


def _disagree(local: int, my_world: int, other: int, their_world: int) -> MeetingError:
    return MeetingError(
        f"differs from the {their_world} of rank {other}, which it met{meeting_place()}",
        place=f"rank {local}",
        key="WORLD_SIZE",
        found=my_world,
        remedy="start all ranks of a job with the same number, and give each job a MASTER_PORT of "
        "its own",
    )
