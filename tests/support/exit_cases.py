"""The processes that a command has started, found by a mark in their environment."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

END_S = 20.0  # seconds until all of them have ended; it takes a second or two


class Marked:
    """A mark for processes. `environment` marks each process that is started with it, and all
    processes that this one starts in turn."""

    def __init__(self, environment: dict[str, str]):
        self.mark = f"MEGATRON_VLM_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.environment = environment | {name: value}

    def alive(self) -> dict[int, tuple[str, dict[str, str]]]:
        """Return command line and environment by process id."""
        processes = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if self.mark in environ:
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    pairs = [each.partition("=") for each in environ]
                    variables = {name: value for name, _, value in pairs}
                    processes[int(entry.name)] = line.replace("\0", " "), variables
        return processes

    def pid_of(self, rank: int) -> int:
        """Return the id of the process that trains as this rank."""
        for pid, (line, variables) in self.alive().items():
            if "-m megatron_vlm.train " in line and variables.get("RANK") == str(rank):
                return pid
        raise AssertionError(f"no process has rank {rank}")

    def kill(self) -> None:
        while processes := self.alive():
            _kill(processes)

    def check_all_gone(self) -> None:
        """Check that no process remains after a moment. A remaining process is killed in any
        case."""
        until = time.monotonic() + END_S
        while (remaining := self.alive()) and time.monotonic() < until:
            time.sleep(0.05)
        _kill(remaining)
        assert not remaining, [line for line, _ in remaining.values()]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
