"""How the ranks of a job find each other, also after a restart."""

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from megatron_vlm.distributed.device import Platform
from megatron_vlm.errors import MegatronVLMError

_POLL_S = 0.01


class MeetingError(MegatronVLMError):
    """A rank did not join."""


def join_world(platform: Platform, minutes: float) -> None:
    """Join torch.distributed as torchrun's variables say, or alone where there are none. No
    collective, nor the wait for other ranks, lasts longer than `minutes`."""
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=minutes)
    store: Any = dist.HashStore()
    rank, world = 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = of_this_attempt(store, rank, world)
    dist.init_process_group(
        platform.dist_backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=platform.device if platform.is_cuda else None,
    )


def of_this_attempt(store: Any, rank: int, world: int) -> Any:
    """A part of the store that no earlier attempt of the job has written to.

    torchrun keeps one store for all attempts, in which torch reads addresses of processes that no
    longer exist: every restart fails (pytorch issues 135712 and 167288; seen with torch 2.13 and
    gloo). torchrun's own count of restarts does not tell attempts apart, as each machine counts for
    itself. So rank 0 numbers the attempt, and tells the ranks that are there now.
    """
    if rank == 0:
        attempt = str(store.add("attempts", 1))
        until = time.monotonic() + store.timeout.total_seconds()
        for other in range(1, world):
            _tell(store, other, attempt, until)
    else:
        me = uuid.uuid4().hex
        store.set(f"joined/{rank}", me)
        try:
            attempt = store.get(f"attempt-of/{me}").decode()
        except dist.DistStoreError:
            raise MeetingError("rank 0 did not join; check its logs") from None
        store.set(f"told/{attempt}/{rank}", me)
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _tell(store: Any, other: int, attempt: str, until: float) -> None:
    """Repeat it until it is acknowledged: the first to join may have been a process of the attempt
    before."""
    while not store.check([f"told/{attempt}/{other}"]):
        if store.check([f"joined/{other}"]):
            store.set(f"attempt-of/{store.get(f'joined/{other}').decode()}", attempt)
        if time.monotonic() > until:
            raise MeetingError(f"rank {other} did not join; check its logs")
        time.sleep(_POLL_S)
