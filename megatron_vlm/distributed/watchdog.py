"""Which rank is stuck, and where: every rank reports its progress, and silence ends the job.

A rank that hangs or dies leaves the others inside a collective, which cannot tell them who is
missing. So a thread of each rank writes its progress to the job's store and reads that of the
others; when nothing has moved for the time-out, it names the rank furthest behind and exits.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from megatron_vlm.distributed.process import STUCK

_NOTHING: list[Any] = [0.0, 0, 0, "start", 0.0]  # a rank that has not reported yet


@dataclass(frozen=True)
class Sign:
    """What a rank last reported."""

    rank: int
    count: int  # of phases that it has begun
    step: int
    phase: str
    age: float  # seconds since its last report
    still: float  # seconds without progress, as of that report


class Watchdog:
    """Each rank starts one and calls `at` when a phase begins. Without a store it does nothing."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float):
        self.store, self.rank, self.world, self.timeout_s = store, rank, world, timeout_s
        self.count, self.step, self.phase = 0, 0, "start"
        self.patient = False
        self.since = time.monotonic()
        self.done = threading.Event()
        self.seen: dict[int, tuple[list[Any], float]] = {}
        self.signs: list[Sign] = []
        self.answered = time.monotonic()  # when the store last answered
        if store is not None and world > 1:
            for work in (self._exchange, self._watch):
                threading.Thread(target=work, daemon=True, name="watchdog").start()

    def at(self, step: int, phase: str, patient: bool = False) -> None:
        """This rank begins a phase; a patient one may take as long as it likes."""
        self.count, self.step, self.phase = self.count + 1, step, phase
        self.patient = patient
        self.since = time.monotonic()

    def alive(self) -> None:
        """The phase is making progress."""
        self.count += 1
        self.since = time.monotonic()

    def stop(self) -> None:
        """The job is done: from now on silence means nothing."""
        self.done.set()

    @property
    def _every(self) -> float:
        return min(5.0, self.timeout_s / 4)

    def _exchange(self) -> None:
        """Apart from `_watch`: if the link to the store is cut, a call to it never returns."""
        while not self.done.wait(self._every):
            still = 0.0 if self.patient else time.monotonic() - self.since
            mine = [time.monotonic(), self.count, self.step, self.phase, still]
            try:
                self.store.write(f"watchdog/{self.rank}", json.dumps(mine))
                self.signs = self._read()
            except Exception:  # the store has ended with rank 0
                return
            self.answered = time.monotonic()

    def _watch(self) -> None:
        while not self.done.wait(self._every):
            text = None
            if (unheard := time.monotonic() - self.answered) > self.timeout_s:
                text = describe_lost(unheard, self.timeout_s, self.step, self.phase)
            elif self.signs and (culprit := find_stuck(self.signs, self.timeout_s)) is not None:
                text = describe(culprit, self.timeout_s)
            if text is not None and not self.done.is_set():
                print(f"megatron-vlm: rank {self.rank}: {text}", file=sys.stderr, flush=True)
                os._exit(STUCK)

    def _read(self) -> list[Sign]:
        now = time.monotonic()
        signs = []
        for rank in range(self.world):
            text = self.store.read(f"watchdog/{rank}")
            said = _NOTHING if text is None else json.loads(text)
            # Only what is newer: somebody may have put back what the rank said before.
            if rank not in self.seen or said[0] > self.seen[rank][0][0]:
                self.seen[rank] = (said, now)
            _, count, step, phase, still = self.seen[rank][0]
            signs.append(Sign(rank, count, step, phase, now - self.seen[rank][1], still))
        return signs


def find_stuck(signs: list[Sign], timeout_s: float) -> Sign | None:
    """The rank to blame, if any: one that is silent, or, if none has moved for the time-out, the
    one that is furthest behind."""
    silent = [sign for sign in signs if sign.age > timeout_s]
    if silent:
        return max(silent, key=lambda sign: sign.age)
    if min(sign.still for sign in signs) > timeout_s:
        return min(signs, key=lambda sign: (sign.count, sign.rank))
    return None


def describe(sign: Sign, timeout_s: float) -> str:
    """One sentence for the user."""
    what = "has not been heard from" if sign.age > timeout_s else "has been stuck"
    seconds = max(sign.age, sign.still)
    return (
        f"rank {sign.rank} {what} for {seconds:.0f} s (launch.timeout_minutes="
        f"{timeout_s / 60:g}); it was at step {sign.step}: {sign.phase}. Stopping; the run resumes "
        "from its last complete checkpoint"
    )


def describe_lost(seconds: float, timeout_s: float, step: int, phase: str) -> str:
    """The same for rank 0, which holds the store: without it no other rank can be asked."""
    return (
        f"rank 0 has not answered for {seconds:.0f} s (launch.timeout_minutes={timeout_s / 60:g}): "
        f"it has died, or the link to it is cut; this rank was at step {step}: {phase}. Stopping; "
        "the run resumes from its last complete checkpoint"
    )
