"""What all ranks must know of each other once a step: that one failed, or was told to stop."""

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

PREEMPTED = 75  # exit status after a signal: saved, start again to go on
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
OK, STOP, FAILED = 0, 1, 2


class Signals:
    """SIGTERM and SIGUSR1 ask to save and stop; they are looked at between steps."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def agree(mine: int, device: torch.device) -> int:
    """The worst of all ranks' words. A collective."""
    word = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return int(word)
