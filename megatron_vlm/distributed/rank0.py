"""Commands from rank 0: it alone has contact with the outside, and all ranks follow it."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_vlm.distributed.agreement import Signals, Vote, all_reduce_max
from megatron_vlm.distributed.collectives import broadcast_bytes, broadcast_json
from megatron_vlm.distributed.watchdog import Watchdog

HEARTBEAT_S = 2.0  # interval of rank 0's messages to the others while it only waits


class CommandChannel:
    """Channel of commands from rank 0, on every rank. All ranks meet before each command. A signal
    to one of them thus stops all, and a rank that waits is not taken for stuck."""

    def __init__(self, watchdog: Watchdog, signals: Signals, device: torch.device):
        self.watchdog, self.signals, self.device = watchdog, signals, device
        self.alone = dist.get_world_size() == 1
        self.last = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """True on rank 0 if the others have received nothing from it for HEARTBEAT_S."""
        return time.monotonic() - self.last >= HEARTBEAT_S

    def meet(self) -> bool:
        """Meet the other ranks, and return whether any of them received a signal. A collective."""
        self.last = time.monotonic()
        self.watchdog.alive()
        vote = Vote.OK if self.signals.received is None else Vote.STOP
        return all_reduce_max(vote, self.device) == Vote.STOP

    def send(self, order: Mapping[str, Any], contents: Sequence[bytes] = ()) -> None:
        """Send a command to the others, on rank 0, after all have met."""
        if self.alone:
            return
        broadcast_json({**order, "contents": len(contents)}, 0, None, self.device)
        for content in contents:
            broadcast_bytes(content, 0, None, self.device)

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the next command and its contents, on the others, after all have met."""
        order = broadcast_json(None, 0, None, self.device)
        count = order.pop("contents")
        return order, [broadcast_bytes(None, 0, None, self.device) for _ in range(count)]


# Rank 0 may have long work that the other ranks do not share. It keeps contact with them meanwhile,
# because they would take it for stuck.

T = TypeVar("T")
SIGNAL_POLL_S = 0.5


def result_of(
    work: "Future[T]", meanwhile: Callable[[], None], every_s: float = SIGNAL_POLL_S
) -> T:
    """Return the result of a future, and call `meanwhile` until it is done."""
    while True:
        try:
            return work.result(every_s)
        except TimeoutError:
            if work.done():  # either the work raised it, or the work has just ended
                return work.result()
            meanwhile()


def run_in_thread(
    work: Callable[[], T], meanwhile: Callable[[], None], every_s: float = SIGNAL_POLL_S
) -> T:
    """Run `work` in a thread and return its result. An error of `meanwhile` is raised at once, and
    the work is abandoned: the process is about to end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="beside").start()
    return result_of(future, meanwhile, every_s)
