"""The processes of a job on this machine: started together, ended together, started again.

torchrun does this too, but answers every end of its processes with exit status 1 and a traceback
of its own, and does not pass SIGUSR1 on. A job has to tell "saved, start me again" from a failure.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron_vlm.distributed.process import MISTAKE, PREEMPTED, RESTART

GRACE_S = 10.0  # for the others to say why they end too; then they are killed
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Ending:
    """Of the process that ended first, or badly first."""

    rank: int
    status: int  # negative: the signal that killed it

    @property
    def exit_status(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.status).name}"
        return f"rank {self.rank} ended with exit status {self.status}"


def run_job(module: str, words: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """`python -m module words` on `count` ranks, again after a failure; the exit status."""
    for restart in range(max_restarts + 1):
        ending, stopped = _run_once(module, words, count, restart)
        if ending.status in (0, MISTAKE, PREEMPTED) or stopped:
            break
        print(f"megatron-vlm: {ending}", file=sys.stderr)
        if restart < max_restarts:
            which = f"restart {restart + 1} of launch.max_restarts={max_restarts}"
            print(f"megatron-vlm: starting again, {which}", file=sys.stderr)
    return ending.exit_status


def _run_once(module: str, words: Sequence[str], count: int, restart: int) -> tuple[Ending, bool]:
    """How the job ended, and whether a signal had asked it to."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        RESTART: str(restart),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C comes through us, once
            preexec_fn=_end_with_parent,
        )
        for rank in range(count)
    ]
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return _wait(processes), bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: Sequence["subprocess.Popen[Any]"]) -> Ending:
    """Until all have ended, or the grace after the first bad end is over."""
    bad: Ending | None = None
    until = float("inf")
    running = dict(enumerate(processes))
    while running and time.monotonic() < until:
        for rank, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[rank]
            if status and bad is None:
                bad, until = Ending(rank, status), time.monotonic() + GRACE_S
        time.sleep(0.05)
    return bad or Ending(0, 0)


def _end_with_parent() -> None:
    """In a new process: a launcher that is killed can forward nothing, but Linux tells its
    children. They save, and end."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
