"""Processes of a job on this machine: started together, ended together, restarted together.

torch's elastic launcher is not sufficient (measured with torch 2.13). After a signal it reports
none of the ranks' exit statuses, so that "saved, start me again" is lost, and a second Ctrl-C does
not reach the ranks. When a rank fails, the others receive SIGTERM at once, which makes them save.
It also restarts after a user's mistake, and its ranks outlive a launcher that was killed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_vlm.distributed.launch.restart import (
    Ending,
    run_with_restarts,
    signals_sent_to,
    wait_for_ranks,
)
from megatron_vlm.distributed.process import (
    ERRORS_FOLDER,
    FAILED,
    INTERRUPTED,
    LAUNCHER,
    PREEMPTED,
    RESTART,
    SECRET,
    STOPPED_EARLY,
    new_secret,
    print_to_user,
)
from megatron_vlm.io.atomic import scratch_folder
from megatron_vlm.io.parent import signal_when_parent_dies

STOP_S = 5.0  # time for the ranks to end after a second Ctrl-C, and after they were killed


def run_job(module: str, arguments: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """Run `python -m module arguments` on `count` ranks, again after a failure."""
    command = [sys.executable, "-m", module, *arguments]
    return run_with_restarts(lambda restart: _run_once(command, count, restart), max_restarts)


def variables_of(count: int, restart: int, port: int) -> dict[str, str]:
    """Return the environment variables that the ranks of one attempt share."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        RESTART: str(restart),
        SECRET: new_secret(),
        LAUNCHER: str(os.getpid()),
    }


def _run_once(command: Sequence[str], count: int, restart: int) -> Ending:
    with _reserved_port() as port:
        return _run_at(port, command, count, restart)


def _run_at(port: int, command: Sequence[str], count: int, restart: int) -> Ending:
    shared = variables_of(count, restart, port) | {
        ERRORS_FOLDER: tempfile.mkdtemp(dir=scratch_folder())
    }
    processes: list[subprocess.Popen[bytes]] = []
    running: dict[int, subprocess.Popen[bytes]] = {}
    interrupts: list[float] = []  # times of Ctrl-C

    def ended() -> list[Ending]:
        time.sleep(0.05)
        if len(interrupts) > 1 and time.monotonic() > interrupts[1] + STOP_S:
            _kill(processes)  # a rank that hangs in a collective does not notice the second Ctrl-C
        done = [rank for rank, process in running.items() if process.poll() is not None]
        return [_ending(rank, running.pop(rank).returncode, received) for rank in done]

    def send(number: int) -> None:
        if number == signal.SIGINT:
            interrupts.append(time.monotonic())
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    try:
        with signals_sent_to(send) as received:
            for rank in range(count):
                processes.append(_start(command, shared, rank))
            if received:  # it came during the start, so that some ranks may have missed it
                print_to_user(STOPPED_EARLY)
                return Ending(PREEMPTED, stopped=True)
            running.update(enumerate(processes))
            ending = wait_for_ranks(count, ended)
        status = INTERRUPTED if len(interrupts) > 1 else ending.status
        return replace(ending, status=status, stopped=bool(received))
    finally:
        _end(processes)


def _start(
    command: Sequence[str], shared: Mapping[str, str], rank: int
) -> "subprocess.Popen[bytes]":
    launcher = os.getpid()
    return subprocess.Popen(
        command,
        env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        start_new_session=True,  # Ctrl-C comes through the launcher, once
        preexec_fn=lambda: _end_with_launcher(launcher),
    )


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    _kill(processes)
    for rank, process in enumerate(processes):
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print_to_user(
                f"rank {rank}, process {process.pid}, is waiting for a device and cannot be killed"
            )


def _kill(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()


def _ending(rank: int, status: int, received: Sequence[int]) -> Ending:
    if -status in received:  # a rank with nothing to save yet may not handle the forwarded signal
        return Ending(PREEMPTED)
    if status < 0:  # number of the signal that killed it
        name = signal.Signals(-status).name
        return Ending(128 - status, f"rank {rank} was killed by {name}")
    return Ending(status, f"rank {rank} ended with exit status {status}")


def _end_with_launcher(launcher: int) -> None:
    """Make Linux send SIGTERM to this new process when its launcher dies and can no longer forward
    signals. The rank then saves and ends. If it cannot, its watchdog ends it."""
    signal_when_parent_dies(signal.SIGTERM)
    if os.getppid() != launcher:  # the launcher had died before the call
        os._exit(FAILED)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port that the kernel gives to no other program and at which rank 0 can listen: of
    two sockets with SO_REUSEADDR one may listen while the other is only bound."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # elsewhere a bound socket blocks the port
            holder.close()
        yield port
