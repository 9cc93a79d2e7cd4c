"""How the ranks of a job find each other, also when it is started again."""

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from megatron_vlm.distributed.device import Platform
from megatron_vlm.errors import MegatronVLMError

_LOOK_S = 0.01


class MeetingError(MegatronVLMError):
    """A rank did not come."""


def join_world(platform: Platform, minutes: float) -> None:
    """Join torch.distributed as torchrun's variables say; alone where there are none. Collectives,
    and the wait for other ranks, last so many minutes at most."""
    if dist.is_initialized():
        return
    patience = datetime.timedelta(minutes=minutes)
    store: Any = dist.HashStore()
    rank, world = 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        store = of_this_attempt(store, rank, world)
    dist.init_process_group(
        platform.dist_backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=patience,
        device_id=platform.device if platform.is_cuda else None,
    )


def of_this_attempt(store: Any, rank: int, world: int) -> Any:
    """A part of the store that no former attempt of the job has written to.

    torchrun keeps one store for all attempts, and torch reads in it addresses of processes that
    are gone: every restart fails (pytorch issues 135712 and 167288; seen with torch 2.13 and gloo).
    torchrun's own count of restarts does not tell attempts apart: each machine counts for itself.
    So rank 0 gives the attempt a number, and tells it to those that are there now.
    """
    if rank == 0:
        attempt = str(store.add("attempts", 1))
        until = time.monotonic() + store.timeout.total_seconds()
        for other in range(1, world):
            _tell(store, other, attempt, until)
    else:
        me = uuid.uuid4().hex
        store.set(f"came/{rank}", me)
        try:
            attempt = store.get(f"attempt-of/{me}").decode()
        except dist.DistStoreError:
            raise MeetingError("rank 0 has not come; see its machine's messages") from None
        store.set(f"took/{attempt}/{rank}", me)
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _tell(store: Any, other: int, attempt: str, until: float) -> None:
    """Until it is taken: who came first may be a process of the attempt before."""
    while not store.check([f"took/{attempt}/{other}"]):
        if store.check([f"came/{other}"]):
            store.set(f"attempt-of/{store.get(f'came/{other}').decode()}", attempt)
        if time.monotonic() > until:
            raise MeetingError(f"rank {other} has not come; see its machine's messages")
        time.sleep(_LOOK_S)
