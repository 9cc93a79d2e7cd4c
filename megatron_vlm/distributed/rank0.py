"""Rank 0 leads: it alone hears from outside, and all ranks do what it tells them."""

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

EVERY_S = 2.0  # that the others hear of rank 0 where it only waits


class CommandChannel:
    """On every rank. All meet before each order, so that whoever was told to stop stops all of
    them, and none that waits is taken for stuck."""

    def __init__(self, watchdog: Watchdog, signals: Signals, device: torch.device):
        self.watchdog, self.signals, self.device = watchdog, signals, device
        self.alone = dist.get_world_size() == 1
        self.last = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """On rank 0: whether the others have not heard of it for long."""
        return time.monotonic() - self.last >= EVERY_S

    def meet(self) -> bool:
        """A collective: whether any rank was told to stop."""
        self.last = time.monotonic()
        self.watchdog.alive()
        vote = Vote.OK if self.signals.received is None else Vote.STOP
        return all_reduce_max(vote, self.device) == Vote.STOP

    def tell(self, order: Mapping[str, Any], contents: Sequence[bytes] = ()) -> None:
        """On rank 0, after all have met."""
        if self.alone:
            return
        broadcast_json({**order, "contents": len(contents)}, 0, None, self.device)
        for content in contents:
            broadcast_bytes(content, 0, None, self.device)

    def hear(self) -> tuple[dict[str, Any], list[bytes]]:
        """On the others, after all have met: the order and its contents."""
        order = broadcast_json(None, 0, None, self.device)
        count = order.pop("contents")
        return order, [broadcast_bytes(None, 0, None, self.device) for _ in range(count)]


# Long work beside the ranks', of which the others hear meanwhile: they would take it for stuck.

T = TypeVar("T")
POLL_S = 0.5


def result_of(work: "Future[T]", meanwhile: Callable[[], None], every_s: float = POLL_S) -> T:
    """Its result; `meanwhile` is called until then."""
    while True:
        try:
            return work.result(every_s)
        except TimeoutError:
            if work.done():  # the work's own error, or it has just ended
                return work.result()
            meanwhile()


def run_in_thread(
    work: Callable[[], T], meanwhile: Callable[[], None], every_s: float = POLL_S
) -> T:
    """What `work` returns, done in a thread. What `meanwhile` raises is raised at once, and the
    work is left to itself: the process is about to end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="beside").start()
    return result_of(done, meanwhile, every_s)
