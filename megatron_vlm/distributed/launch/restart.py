"""Attempts at a job: waiting for its ranks, stopping them, starting them again."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

from megatron_vlm.distributed import process

RANK_GRACE_S = 10.0  # time for the other ranks to report why they end too, once one has failed
LAST_S = 120.0  # time for the other ranks to end, once one is done: they finish together


@dataclass(frozen=True)
class Ending:
    """End of a job, with the first rank that failed, if any did."""

    status: int
    reason: str = ""
    stopped: bool = False  # the launcher received a signal

    @property
    def may_retry(self) -> bool:
        """True if another attempt may help."""
        return not self.stopped and self.status not in (
            0,
            process.MISTAKE,
            process.UNLIKE,
            process.PREEMPTED,
        )


def run_with_restarts(attempt: Callable[[int], Ending], max_restarts: int) -> int:
    """Call `attempt` with the number of restarts so far, and again after each failure. Return the
    exit status of the job."""
    for restart in range(max_restarts + 1):
        ending = attempt(restart)
        if not ending.may_retry:
            break
        if ending.reason:
            process.print_to_user(ending.reason)
        if restart < max_restarts:
            process.print_to_user(
                f"starting again, restart {restart + 1} of launch.max_restarts={max_restarts}"
            )
    return ending.status


@contextlib.contextmanager
def signals_sent_to(send: Callable[[int], None]) -> Iterator[list[int]]:
    """Pass signals that ask to stop to `send` during the body. Yield the list of signals."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        send(number)

    with process.stop_signals_to(forward):
        yield received


def wait_for_ranks(count: int, ended: Callable[[], Iterable[Ending]]) -> Ending:
    """Wait until all ranks have ended, or until RANK_GRACE_S after the first failure, or LAST_S
    after the first rank is done. `ended` waits a moment and returns the ranks that ended since its
    last call."""
    failure: Ending | None = None
    deadline = float("inf")
    while count and time.monotonic() < deadline:
        # Ranks that lose another one fail as well, perhaps in the same moment.
        for ending in sorted(ended(), key=lambda each: each.status == process.FAILED):
            count -= 1
            deadline = min(deadline, time.monotonic() + LAST_S)
            if ending.status and failure is None:
                failure, deadline = ending, time.monotonic() + RANK_GRACE_S
    if count and failure is None:
        return Ending(
            process.STUCK, f"{count} of the ranks did not end in {LAST_S:.0f} s after another had"
        )
    return failure or Ending(0)
