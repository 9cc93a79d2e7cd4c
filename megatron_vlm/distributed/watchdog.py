"""Which rank is stuck, and where: every rank reports its progress, and silence ends the job.

A rank that hangs or dies leaves the others inside a collective, which cannot tell them who is
missing. So a thread of each rank, started before anything that may hang, looks whether the rank
gets on; once the ranks have met, another one writes that to the job's store and reads what the
others have written. When nothing has moved for the time-out, the rank furthest behind is named, and
the process exits. A rank whose threads cannot run is ended from outside: see watchdog_process.py.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vlm.distributed.process import LAUNCHER, STUCK, say
from megatron_vlm.distributed.watchdog_process import WatchdogProcess

if TYPE_CHECKING:
    from megatron_vlm.distributed.job_store import SignedStore

_NAME = "watchdog"  # of its threads
_SAY_S = 2.0  # for a message: whoever should read our output may have stopped doing so
_MOVED = 2**16  # bytes that count as progress: logging threads write a few, whatever happens
_WORKED = 0.01  # share of the time that counts as progress at the start: waiting in a loop is less

_NOTHING: list[Any] = [0, [0, 0], 0, "start", 0.0]  # a rank that has not reported yet


@dataclass(frozen=True)
class RankStatus:
    """What a rank last reported."""

    rank: int
    reached: tuple[int, int]  # phases that it has begun, and signs of life in the last one
    step: int
    phase: str
    age: float  # seconds since its last report
    still: float  # seconds without progress, as of that report


class Watchdog:
    """Each rank starts one and calls `at` when a phase begins. Without a time-out it does nothing.

    Time is what `clock` has counted: while this process is stopped, as by Ctrl-Z, none passes.
    """

    def __init__(self, rank: int, timeout_s: float | None):
        self.rank, self.timeout_s, self.every_s = rank, timeout_s, min(5.0, (timeout_s or 0.0) / 4)
        self.phases, self.signs_of_life, self.step, self.phase = 0, 0, 0, "start"
        self.files = True  # the imports read them
        self.clock = self.since = 0.0
        self.moved, self.worked = 0, 0.0
        self.cpu_clock = _clock_of_this_thread()
        self.done = threading.Event()
        self.answered: float | None = None  # when the store last did; None before the ranks met
        self.seen: dict[int, tuple[list[Any], float]] = {}
        self.signs: list[RankStatus] = []
        self.sentinel: WatchdogProcess | None = None
        self.thread: threading.Thread | None = None
        if timeout_s is not None:
            self.sentinel = WatchdogProcess(rank, self.every_s, timeout_s + 2 * self.every_s)
            self.thread = threading.Thread(target=self._watch, daemon=True, name=_NAME)
            self.thread.start()

    @staticmethod
    @contextlib.contextmanager
    def over(rank: int, timeout_minutes: float) -> Iterator["Watchdog"]:
        """One that watches over the body."""
        watchdog = Watchdog(rank, 60 * timeout_minutes)
        try:
            yield watchdog
        finally:
            watchdog.stop()

    def join(self, board: "SignedStore | None", world: int) -> None:
        """The ranks have met: from now on, watch the others too. Alone, a rank has no board."""
        if self.timeout_s is not None and board is not None:
            self.answered = self.clock
            work = partial(self._exchange, board, world)
            threading.Thread(target=work, daemon=True, name=_NAME).start()

    def at(self, step: int, phase: str, files: bool = False) -> None:
        """This rank begins a phase. One that reads or writes `files` may take as long as it likes,
        if only bytes move; others make progress by `alive`, or not at all."""
        self.phases, self.signs_of_life = self.phases + 1, 0
        self.step, self.phase, self.files = step, phase, files
        self.since = self.clock
        self._tell()

    def alive(self) -> None:
        """The phase is making progress, on all ranks alike: who does it less often is behind."""
        self.signs_of_life += 1
        self.since = self.clock

    def busy(self) -> None:
        """This rank is making progress; others may have less to do."""
        self.since = self.clock

    def stop(self) -> None:
        """The job is done: from now on silence means nothing."""
        self.done.set()
        if self.thread is not None and self.sentinel is not None:
            self.thread.join()
            self.sentinel.close()
            self.sentinel = None

    @property
    def where(self) -> str:
        """Step and phase, for messages."""
        return f"step {self.step}: {self.phase}"

    def _watch(self) -> None:
        assert self.timeout_s is not None
        last, orphan_s = time.monotonic(), 0.0
        while not self.done.wait(self.every_s):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.every_s), now
            self.clock += passed
            orphan_s += passed if lost_launcher() else 0.0
            self._tell()
            if self.files and (moved := bytes_moved()) >= self.moved + _MOVED:
                self.moved, self.since = moved, self.clock
            if self._works(passed) and not self.phases:
                self.since = self.clock
            if (text := self._complaint(self.timeout_s, orphan_s)) and not self.done.is_set():
                end(f"rank {self.rank}: {text}")

    def _works(self, passed: float) -> bool:
        """Whether the thread that made this one computed in the time that has passed, as imports do
        that read little: libraries are mapped."""
        before = self.worked
        with contextlib.suppress(OSError):  # the thread has ended
            self.worked = 0.0 if self.cpu_clock is None else time.clock_gettime(self.cpu_clock)
        return self.worked - before >= _WORKED * passed > 0

    def _tell(self) -> None:
        if self.sentinel is not None:
            self.sentinel.tell(self.where)

    def _complaint(self, timeout_s: float, orphan_s: float) -> str | None:
        """Why the process must end, if it must."""
        if orphan_s > timeout_s:
            return describe_orphan(orphan_s, timeout_s, self.where)
        if self.answered is not None and (unheard := self.clock - self.answered) > timeout_s:
            return describe_lost(unheard, timeout_s, self.where)
        still, reached = self.clock - self.since, (self.phases, self.signs_of_life)
        mine = RankStatus(self.rank, reached, self.step, self.phase, 0.0, still)
        culprit = find_stuck(self.signs or [mine], timeout_s)
        return None if culprit is None else describe(culprit, timeout_s)

    def _exchange(self, board: "SignedStore", world: int) -> None:
        """Apart from `_watch`: if the link to the store is cut, a call to it never returns."""
        beat = 0
        while not self.done.wait(self.every_s):
            beat += 1
            reached = self.phases, self.signs_of_life
            mine = [beat, reached, self.step, self.phase, self.clock - self.since]
            try:
                board.write(f"watchdog/{self.rank}", json.dumps(mine))
                self.signs = [self._read(board, rank) for rank in range(world)]
            except Exception:  # the store has ended with rank 0
                return
            self.answered = self.clock

    def _read(self, board: "SignedStore", rank: int) -> RankStatus:
        text = board.read(f"watchdog/{rank}")
        said = _NOTHING if text is None else json.loads(text)
        # Only what is newer: somebody may have put back what the rank said before.
        if rank not in self.seen or said[0] > self.seen[rank][0][0]:
            self.seen[rank] = (said, self.clock)
        _, reached, step, phase, still = self.seen[rank][0]
        return RankStatus(rank, tuple(reached), step, phase, self.clock - self.seen[rank][1], still)


def _clock_of_this_thread() -> int | None:
    """Of the seconds that it has computed."""
    if sys.platform != "linux":
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


def lost_launcher() -> bool:
    """Whether the launcher of this process was ours and has died."""
    launcher = os.environ.get(LAUNCHER)
    return launcher is not None and os.getppid() != int(launcher)


def bytes_moved() -> int:
    """Read and written by the threads that Python has started, and by the data workers: not by the
    network's threads, nor by the watchdog's own."""
    threads = [thread for thread in threading.enumerate() if thread.name != _NAME]
    total = 0
    for place in [*(f"self/task/{thread.native_id}" for thread in threads), *_data_workers()]:
        with contextlib.suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{place}/io").read_text().split()
            total += int(lines[1]) + int(lines[3])
    return total


def _data_workers() -> list[str]:
    """The process ids of what Python's fork server has started."""
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009 - not in typeshed
    try:
        return Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:  # there is no server
        return []


def end(text: str) -> None:
    """Say it and end this process, even if nobody reads what it says."""
    saying = threading.Thread(target=say, args=(text,), daemon=True, name=_NAME)
    saying.start()
    saying.join(_SAY_S)
    os._exit(STUCK)


def find_stuck(signs: list[RankStatus], timeout_s: float) -> RankStatus | None:
    """The rank to blame, if any: one that is silent, or, if none has moved for the time-out, the
    one that is furthest behind."""
    silent = [sign for sign in signs if sign.age > timeout_s]
    if silent:
        return max(silent, key=lambda sign: sign.age)
    if min(sign.still for sign in signs) > timeout_s:
        return min(signs, key=lambda sign: (sign.reached, sign.rank))
    return None


def describe(sign: RankStatus, timeout_s: float) -> str:
    """One sentence for the user."""
    what = "has not been heard from" if sign.age > timeout_s else "has been stuck"
    where = f"step {sign.step}: {sign.phase}"
    return _sentence(f"rank {sign.rank} {what}", max(sign.age, sign.still), timeout_s, where)


def describe_lost(seconds: float, timeout_s: float, where: str) -> str:
    """The same for rank 0, which holds the store: without it no other rank can be asked."""
    what = "rank 0, which has died or cannot be reached, has not answered"
    return _sentence(what, seconds, timeout_s, where, "this rank")


def describe_orphan(seconds: float, timeout_s: float, where: str) -> str:
    """The same for a rank that did not end after its launcher had died."""
    return _sentence("the launcher has been dead", seconds, timeout_s, where, "this rank")


def _sentence(what: str, seconds: float, timeout_s: float, where: str, who: str = "it") -> str:
    return (
        f"{what} for {seconds:.0f} s (launch.timeout_minutes={timeout_s / 60:g}); {who} was at "
        f"{where}. Stopping; the run resumes from its last complete checkpoint"
    )
