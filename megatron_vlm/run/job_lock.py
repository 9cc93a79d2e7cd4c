"""job.lock of a run folder: which job writes the run, or was the last to do so, and how it ended.

The first line names the process. The second one is written at the end: `ended`, or `failed: ` with
the reason. A job that was killed leaves no second line, and the kernel releases its lock.
"""

import contextlib
import datetime
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import ConfigError, sentences
from megatron_vlm.io.atomic import try_lock

JOB_LOCK = "job.lock"
_ENDED, _FAILED = "ended", "failed: "
_MAX_BYTES = 4096
_MAX_REASON = 1000  # characters
_PATIENCE_S = 5  # for an earlier job of the run to release the folder
_PATIENCE_AFTER_RESTART_S = 60  # A file server releases a dead machine's locks late.


@dataclass(frozen=True)
class Job:
    """The job that writes a run, or was the last to do so."""

    is_running: bool
    has_ended: bool = False  # in an orderly way
    failure: str | None = None  # why it ended


@contextmanager
def hold_job_lock(folder: Path) -> Iterator[None]:
    """Lock the folder, since only one job at a time may write a run. The lock ends with the process
    at the latest."""
    with open(folder / JOB_LOCK, "a+", encoding="utf-8") as file:
        until = time.monotonic() + (_PATIENCE_AFTER_RESTART_S if restarts() else _PATIENCE_S)
        while not try_lock(file.fileno()):
            if time.monotonic() > until:
                file.seek(0)
                raise ConfigError(
                    f"is being written by another job ({file.read()})",
                    key="run",
                    found=str(folder),
                    remedy="wait for it, stop it, or give another folder",
                )
            time.sleep(0.1)
        file.truncate(0)
        now = datetime.datetime.now().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
        file.flush()
        try:
            yield
        except Exception as error:
            _write_end(file, _FAILED + _reason(error))
            raise
        except BaseException:  # Ctrl-C, or a signal before there was anything to save
            _write_end(file, _ENDED)
            raise
        _write_end(file, _ENDED)


def read_job(folder: Path) -> Job | None:
    """Return the job of a run folder; None if it has no readable job.lock. Links are not
    followed."""
    try:
        handle = os.open(folder / JOB_LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    with open(handle, "rb") as file:
        # A job that starts at this moment tries again for some seconds.
        is_running = not try_lock(handle, shared=True)
        text = file.read(_MAX_BYTES).decode(errors="replace")
    _, _, end = text.partition("\n")
    return Job(
        is_running,
        has_ended=end.strip() == _ENDED,
        failure=end.removeprefix(_FAILED).strip() if end.startswith(_FAILED) else None,
    )


def _write_end(file: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full, which the error may be about
        file.write(f"\n{text}")
        file.flush()


def _reason(error: Exception) -> str:
    text = next(iter(sentences(error)), f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:_MAX_REASON]
