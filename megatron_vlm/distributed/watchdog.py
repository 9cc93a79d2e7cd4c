"""Detection of a stuck rank: every rank reports its progress, and silence ends the job.

A rank that hangs or dies leaves the others inside a collective, which cannot name the missing rank.
So each rank has a thread that checks whether it makes progress, and, once the ranks have met, one
that exchanges states through the job's store. When no rank has made progress for the time-out, the
process names the rank furthest behind and exits. A rank that makes no progress keeps its stacks,
which watchdog_process.py writes when the rank ends. It also ends a rank whose threads cannot
run."""

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

from megatron_vlm.distributed import process
from megatron_vlm.distributed.watchdog_process import WatchdogProcess, dumps_of
from megatron_vlm.errors import sentences
from megatron_vlm.secret_text import hide_secrets

if TYPE_CHECKING:
    from megatron_vlm.distributed.job_store import SignedStore

_FAILURE = "failed"  # key of the store: a rank that failed alone, and its words
_NAME = "watchdog"  # name of the watchdog's threads
_SAY_S = 2.0  # time for a message: the reader of the output may have stopped reading
_MOVED = 2**16  # bytes that count as progress: logging threads always write a few
_WORKED = 0.01  # share of time that counts as progress at the start: a loop that waits takes less

_NOTHING: list[Any] = [0, [0, 0], 0, "start", 0.0]  # state of a rank that has not reported yet


@dataclass(frozen=True)
class RankStatus:
    """Last report of a rank."""

    rank: int
    reached: tuple[int, int]  # phases that it has started, and signs of life in the last one
    step: int
    phase: str
    age: float  # seconds since its last report
    still: float  # seconds without progress, as of that report


class Watchdog:
    """Watchdog of a rank, which calls `at` when a phase starts. Without a time-out it does nothing.

    Time is measured by `clock`, which does not advance while this process is stopped, as by Ctrl-Z.
    `folder` is for the stacks of the ranks that are ended.
    """

    def __init__(self, rank: int, timeout_s: float | None, folder: str = ""):
        self.rank, self.timeout_s, self.every_s = rank, timeout_s, min(5.0, (timeout_s or 0.0) / 4)
        self.folder = folder
        self.phases, self.signs_of_life, self.step, self.phase = 0, 0, 0, "start"
        self.files = True  # the imports read files
        self.clock = self.since = 0.0
        self.moved, self.worked = 0, 0.0
        is_linux = sys.platform == "linux"  # no other system has these clocks
        self.cpu_clock = time.pthread_getcpuclockid(threading.get_ident()) if is_linux else None
        self.done = threading.Event()
        self.answered: float | None = None  # time of the store's last reply; None before ranks met
        self.seen: dict[int, tuple[list[Any], float]] = {}
        self.signs: list[RankStatus] = []
        self.board: SignedStore | None = None
        self.failure: tuple[str, float] | None = None  # words of another rank, and when they came
        self.sentinel: WatchdogProcess | None = None
        self.thread: threading.Thread | None = None
        if timeout_s is not None:
            silence_s = timeout_s + 2 * self.every_s
            self.sentinel = WatchdogProcess(rank, self.every_s, silence_s, folder)
            self.thread = threading.Thread(target=self._watch, daemon=True, name=_NAME)
            self.thread.start()

    @staticmethod
    @contextlib.contextmanager
    def watch_rank(rank: int, timeout_minutes: float, run: str = "") -> Iterator["Watchdog"]:
        """Create a watchdog for the body. `run` is the folder of the run, if there is one."""
        watchdog = Watchdog(rank, 60 * timeout_minutes, run and os.path.join(run, "stacks"))
        try:
            yield watchdog
        except Exception as error:
            watchdog.tell_failure(error)
            raise
        finally:
            watchdog.stop()

    def join(self, board: "SignedStore | None", world: int) -> None:
        """Start to watch the other ranks too, after they have met. A rank alone has no store."""
        if self.timeout_s is not None and board is not None:
            self.board, self.answered = board, self.clock
            work = partial(self._keep_exchanging, board, world)
            threading.Thread(target=work, daemon=True, name=_NAME).start()

    def begin_phase(self, step: int, phase: str, files: bool = False) -> None:
        """Start a phase of this rank. A phase that reads or writes `files` may take any time as
        long as bytes move. Others make progress only by `alive` and `busy`."""
        self.phases, self.signs_of_life = self.phases + 1, 0
        self.step, self.phase, self.files = step, phase, files
        self.since = self.clock
        self._report_place()

    def alive(self) -> None:
        """Report progress of a phase that all ranks report equally often."""
        self.signs_of_life += 1
        self.since = self.clock

    def busy(self) -> None:
        """Report progress of this rank. Others may have less to do."""
        self.since = self.clock

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks why this one ends, unless they know. gloo's collectives fail when a
        rank has ended, but NCCL's wait for it."""
        if (
            self.board is None
            or getattr(error, process.ON_ALL_RANKS, False)
            or process.is_lost_peer(error)
        ):
            return
        words = "; ".join(sentences(error)) or f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store has ended with rank 0
            self.board.write(_FAILURE, json.dumps([self.rank, hide_secrets(words)]))
            if self.rank == 0:  # the store may end with this process
                time.sleep(self.every_s)

    def stop(self) -> None:
        """Stop the watchdog at the end of the job."""
        self.done.set()
        if self.thread is not None and self.sentinel is not None:
            self.thread.join()
            self.sentinel.forget()
            self.sentinel.close()
            self.sentinel = None

    @property
    def where(self) -> str:
        """Step and phase, for messages."""
        return f"step {self.step}: {self.phase}"

    def _watch(self) -> None:
        assert self.timeout_s is not None and self.sentinel is not None
        last, orphan_s, launcher = time.monotonic(), 0.0, os.environ.get(process.LAUNCHER)
        while not self.done.wait(self.every_s):
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * self.every_s), now
            self.clock += elapsed
            if launcher is not None and os.getppid() != int(launcher):  # it has died
                orphan_s += elapsed
            self._report_place()
            if self.files and (moved := bytes_moved()) >= self.moved + _MOVED:
                self.moved, self.since = moved, self.clock
            if self._works(elapsed) and not self.phases:
                self.since = self.clock
            text = self._complaint(self.timeout_s, orphan_s)
            if text or self.clock - self.since > self.timeout_s:
                self.sentinel.dump()  # before another rank ends the job
            else:
                self.sentinel.forget()
            if text and not self.done.is_set():
                status = process.STUCK if self.failure is None else process.FAILED
                end(f"rank {self.rank}: {text}", self.sentinel, status)

    def _works(self, passed: float) -> bool:
        """Return whether the thread that made this watchdog computed during the last interval.
        Imports do, although they may read little: libraries are mapped."""
        before = self.worked
        with contextlib.suppress(OSError):  # the thread has ended
            self.worked = 0.0 if self.cpu_clock is None else time.clock_gettime(self.cpu_clock)
        return self.worked - before >= _WORKED * passed > 0

    def _report_place(self) -> None:
        if self.sentinel is not None:
            self.sentinel.tell(self.where)

    def _complaint(self, timeout_s: float, orphan_s: float) -> str | None:
        """Return why the process must end, or None."""
        own = f"this rank was at {self.where}", _dump_name(self.folder, self.rank)
        if orphan_s > timeout_s:
            return _sentence("the launcher has been dead", orphan_s, timeout_s, *own)
        if self.answered is not None and (silence := self.clock - self.answered) > timeout_s:
            # It holds the store: without it no other rank can be read.
            what = "rank 0, which has died or cannot be reached, has not answered"
            return _sentence(what, silence, timeout_s, *own)
        if self.failure is not None:
            words, known_since = self.failure
            if self.clock - max(known_since, self.since) > 2 * self.every_s:
                return f"{words}; {own[0]}"
        still, reached = self.clock - self.since, (self.phases, self.signs_of_life)
        status = RankStatus(self.rank, reached, self.step, self.phase, 0.0, still)
        culprit = find_stuck(self.signs or [status], timeout_s)
        return None if culprit is None else describe(culprit, timeout_s, self.folder)

    def _keep_exchanging(self, board: "SignedStore", world: int) -> None:
        """Exchange states with the other ranks. It has its own thread, because a call to the store
        never returns if the connection is cut."""
        beat = 0
        with contextlib.suppress(Exception):  # the store has ended with rank 0
            while not self.done.wait(self.every_s):
                beat += 1
                self.exchange(board, world, beat)

    def exchange(self, board: "SignedStore", world: int, beat: int) -> None:
        """Write the state of this rank, and read the others'."""
        reached = self.phases, self.signs_of_life
        state = [beat, reached, self.step, self.phase, self.clock - self.since]
        board.write(f"watchdog/{self.rank}", json.dumps(state))
        texts = board.read_all([f"watchdog/{rank}" for rank in range(world)])
        self.signs = [self._status_of(*each) for each in enumerate(texts)]
        if self.failure is None and (text := board.read(_FAILURE)) is not None:
            self.failure = "rank {} has failed: {}".format(*json.loads(text)), self.clock
        self.answered = self.clock

    def _status_of(self, rank: int, text: str | None) -> RankStatus:
        state = _NOTHING if text is None else json.loads(text)
        # A state must be newer: somebody may have restored an earlier one of this rank.
        if rank not in self.seen or state[0] > self.seen[rank][0][0]:
            self.seen[rank] = (state, self.clock)
        _, reached, step, phase, still = self.seen[rank][0]
        return RankStatus(rank, tuple(reached), step, phase, self.clock - self.seen[rank][1], still)


def bytes_moved() -> int:
    """Return the bytes read and written by the threads that Python has started and by the data
    workers, without the threads of the network and the watchdog."""
    threads = [thread for thread in threading.enumerate() if thread.name != _NAME]
    total = 0
    for place in [*(f"self/task/{thread.native_id}" for thread in threads), *_data_workers()]:
        with contextlib.suppress(OSError):  # it has just ended
            words = Path(f"/proc/{place}/io").read_text().split()
            total += int(words[1]) + int(words[3])
    return total


def _data_workers() -> list[str]:
    """Return the process ids of the processes that Python's fork server has started."""
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009 - not in typeshed
    try:
        return Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:  # there is no server
        return []


def end(text: str, sentinel: WatchdogProcess, status: int = process.STUCK) -> None:
    """Print the text and end this process, even if its output or its dumps cannot be written."""
    printer = threading.Thread(target=process.print_to_user, args=(text,), daemon=True, name=_NAME)
    printer.start()
    printer.join(_SAY_S)
    sentinel.close(_SAY_S)
    os._exit(status)


def find_stuck(signs: list[RankStatus], timeout_s: float) -> RankStatus | None:
    """Return the rank to blame, if any: a silent one, or the last one if none makes progress."""
    silent = [sign for sign in signs if sign.age > timeout_s]
    if silent:
        return max(silent, key=lambda sign: sign.age)
    if min(sign.still for sign in signs) > timeout_s:
        return min(signs, key=lambda sign: (sign.reached, sign.rank))
    return None


def describe(sign: RankStatus, timeout_s: float, folder: str = "") -> str:
    """Return one sentence for the user. A silent rank may be unable to leave its stacks."""
    is_silent = sign.age > timeout_s
    what = "has not been heard from" if is_silent else "has been stuck"
    where = f"it was at step {sign.step}: {sign.phase}"
    stacks = folder if is_silent else _dump_name(folder, sign.rank)
    longest = max(sign.age, sign.still)
    return _sentence(f"rank {sign.rank} {what}", longest, timeout_s, where, stacks)


def _dump_name(folder: str, rank: int) -> str:
    return folder and dumps_of(folder, rank)[0]


def _sentence(what: str, seconds: float, timeout_s: float, where: str, stacks: str) -> str:
    seen = f"Stopping; {stacks} shows where its threads are, and" if stacks else "Stopping;"
    return (
        f"{what} for {seconds:.0f} s (launch.timeout_minutes={timeout_s / 60:g}); {where}. {seen} "
        "the run resumes from its last complete checkpoint"
    )
