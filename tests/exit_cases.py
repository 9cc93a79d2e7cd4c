"""Every process that a command has started, found by a mark in its environment."""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

END_S = 20.0  # for all of them to be gone: it takes a second or two


class Marked:
    """`environment` marks what is started with it, and all that this starts in turn."""

    def __init__(self, environment: dict[str, str]):
        self.mark = f"MEGATRON_VLM_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.environment = environment | {name: value}

    def alive(self) -> dict[int, tuple[str, dict[str, str]]]:
        """Command line and environment by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if self.mark in environ:
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    pairs = [each.partition("=") for each in environ]
                    variables = {name: value for name, _, value in pairs}
                    found[int(entry.name)] = line.replace("\0", " "), variables
        return found

    def pid_of(self, rank: int) -> int:
        """Of the process that trains as this rank."""
        for pid, (line, variables) in self.alive().items():
            if "-m megatron_vlm.train " in line and variables.get("RANK") == str(rank):
                return pid
        raise AssertionError(f"no process has rank {rank}")

    def check_all_gone(self) -> None:
        """None is left after a moment; what is left is killed all the same."""
        until = time.monotonic() + END_S
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, [line for line, _ in left.values()]
