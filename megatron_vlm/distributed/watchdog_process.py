"""Process next to a rank that ends it when the rank can no longer do so itself.

The watchdog, a thread, does not run while the rank is stopped (SIGSTOP), nor while code in C keeps
Python's lock, as in a read from a mapped file on a lost file system. It writes a line at each
check; after a long silence the rank is killed. This process ends with the pipe between them.

    python watchdog_process.py FD RANK EVERY_S TIMEOUT_S"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import IO


class WatchdogProcess:
    """Handle of the process, in the rank."""

    def __init__(self, rank: int, every_s: float, timeout_s: float):
        reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        words = [str(reading), str(rank), str(every_s), str(timeout_s)]
        # The process loads only what this file needs: it starts in milliseconds and takes 8 MB.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[reading],
        )
        os.close(reading)

    def tell(self, where: str) -> None:
        """Report that the rank is alive, and where it is."""
        with contextlib.suppress(OSError):  # it was killed, or it is stopped and the pipe is full
            os.write(self.writing, f"{where}\n".encode())

    def close(self) -> None:
        """End the process."""
        os.close(self.writing)
        self.process.wait()


def stand(pipe: IO[bytes], rank: int, every_s: float, timeout_s: float) -> None:
    """Wait until the pipe closes. Kill the rank if it is silent for the time-out."""
    parent, silent, where = os.getppid(), 0, "start"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these signals are for the rank
    # Intervals are counted, not measured: no time passes while both processes are stopped, as by
    # Ctrl-Z.
    while silent * every_s <= timeout_s:
        if not select.select([pipe], [], [], every_s)[0]:
            silent += 1
            continue
        if not (lines := os.read(pipe.fileno(), 65536)):
            return
        silent, where = 0, lines.decode(errors="replace").splitlines()[-1]
    if os.getppid() == parent:
        print(
            f"megatron-vlm: rank {rank} has not run for {timeout_s:.0f} s "
            f"(launch.timeout_minutes): it was stopped, or hangs where Python cannot end it; it "
            f"was at {where}. Killing it; the run resumes from its last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb", buffering=0) as given:
        stand(given, int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
