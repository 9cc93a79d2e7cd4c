"""What all ranks must know of each other once a step: that one failed, or was told to stop."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
OK, STOP, FAILED = 0, 1, 2


class Signals:
    """SIGTERM, SIGUSR1 and Ctrl-C ask to save and stop; they are looked at between steps. A second
    Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def job_store() -> Any:
    """The store through which the ranks found each other; None for one alone."""
    return dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None


def meet(name: str) -> None:
    """Wait for every rank, however long it takes: indexing a data set may outlast any time-out of
    a collective. The watchdog sees who is silent. `name`: of this meeting, once in a job."""
    store, delay = job_store(), 0.01
    if store is None:
        return
    store.add(f"meet/{name}", 1)
    while store.add(f"meet/{name}", 0) < dist.get_world_size():
        time.sleep(delay)
        delay = min(2 * delay, 1.0)


def agree(mine: int, device: torch.device) -> int:
    """The worst of all ranks' words. A collective."""
    word = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return int(word)
