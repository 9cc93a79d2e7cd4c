"""Process next to a rank that ends it when the rank can no longer do so itself.

The watchdog, a thread, does not run while the rank is stopped (SIGSTOP), nor while code in C keeps
Python's lock, as in a read from a mapped file on a lost file system. It writes a line at each
check; after a long silence the rank is killed. This process ends with the pipe between them, and
then writes what the rank has dumped in memory into FOLDER, whose file system may hang for the rank.

    python watchdog_process.py FD RANK EVERY_S TIMEOUT_S FOLDER STACKS_FD COLLECTIVES_FD"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from typing import IO

_ASK = signal.SIGUSR2  # at this signal, a rank dumps its stacks even while C keeps Python's lock
_DUMP_S = 2.0  # time for that: a stopped rank never does
_WRITE_S = 60.0  # time to write the dumps: a file system or a reader of the output may hang


class WatchdogProcess:
    """Handle of the process, in the rank. `folder` is for the dumps; "" prints the stacks."""

    def __init__(self, rank: int, every_s: float, timeout_s: float, folder: str = ""):
        reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.stacks, self.collectives = _file_in_memory(), _file_in_memory()
        faulthandler.register(_ASK, self.stacks)
        fds = (reading, self.stacks, self.collectives)
        words = map(str, (reading, rank, every_s, timeout_s, folder, *fds[1:]))
        # The process loads only what this file needs: it starts in milliseconds and takes 8 MB.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
        )
        os.close(reading)

    def tell(self, where: str) -> None:
        """Report that the rank is alive, and where it is."""
        with contextlib.suppress(OSError):  # it was killed, or it is stopped and the pipe is full
            os.write(self.writing, f"{where}\n".encode())

    def dump(self) -> None:
        """Keep the stacks of all threads, and torch's record of the last collectives, if any."""
        self.forget()
        faulthandler.dump_traceback(self.stacks)
        torch = sys.modules.get("torch._C._distributed_c10d")
        dump = getattr(torch, "_dump_nccl_trace", getattr(torch, "_dump_fr_trace", None))
        if dump is not None:
            with contextlib.suppress(Exception):  # without it, the rank must end all the same
                os.write(self.collectives, dump())

    def forget(self) -> None:
        """Drop the dumps: the rank goes on."""
        for fd in (self.stacks, self.collectives):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)

    def close(self, timeout_s: float | None = None) -> None:
        """End the process, which first writes the dumps it has."""
        os.close(self.writing)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        faulthandler.unregister(_ASK)
        os.close(self.stacks)
        os.close(self.collectives)


def _file_in_memory() -> int:
    """Return the descriptor of a new file, which on macOS is an unnamed one of a disk."""
    if sys.platform == "linux":
        return os.memfd_create("watchdog")
    import tempfile  # as many milliseconds as all the rest

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def dumps_of(folder: str, rank: int) -> tuple[str, str]:
    """Return the files of a rank's stacks and of its collectives."""
    return os.path.join(folder, f"rank{rank}.txt"), os.path.join(folder, f"collectives_{rank}")


def write_dumps(folder: str, rank: int, stacks: int, collectives: int) -> None:
    """Write the dumps. Print the stacks if they cannot be written. A signal ends this process if
    that takes too long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _WRITE_S)
    for file, fd in zip(dumps_of(folder, rank), (stacks, collectives), strict=True):
        if not (content := os.pread(fd, os.fstat(fd).st_size, 0)):
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            _replace(folder, os.path.basename(file), content)
        except OSError:
            if fd == stacks:
                text = content.decode(errors="replace")
                print(f"Stacks of rank {rank}:\n{text}", file=sys.stderr, flush=True)


def _replace(folder: str, name: str, content: bytes) -> None:
    """Write a file in place of anything that has its name in the folder. Follow no link."""
    place, new = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW), f"{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=place)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=place), "wb") as to:
        to.write(content)
    os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)


def _await_dump(stacks: int) -> None:
    until, size = time.monotonic() + _DUMP_S, 0
    while time.monotonic() < until:
        time.sleep(_DUMP_S / 10)
        if 0 < size == os.fstat(stacks).st_size:
            return
        size = os.fstat(stacks).st_size


def stand(pipe: IO[bytes], rank: int, every_s: float, timeout_s: float, stacks: int) -> None:
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
        os.kill(parent, _ASK)
        _await_dump(stacks)
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    rank, places = int(sys.argv[2]), [int(word) for word in sys.argv[6:]]
    with open(int(sys.argv[1]), "rb", buffering=0) as given:
        stand(given, rank, float(sys.argv[3]), float(sys.argv[4]), places[0])
    write_dumps(sys.argv[5], rank, *places)
