"""The folder of a run: marked as the run's, and locked by one job at a time.

job.lock says which job writes the run, or was the last to do so, and how it ended. Its first line
names the process. The second one is written at the end: `ended`, or `failed: ` with the reason. A
job that was killed leaves no second line, and the kernel releases its lock.
"""

import contextlib
import datetime
import os
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_vlm.checkpoint.retention import check_leftovers, last_serial
from megatron_vlm.config import to_yaml
from megatron_vlm.config.evaluation_checks import held_out_names
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported, exports
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import ConfigError, sentences
from megatron_vlm.hf.export_folder import check_replaceable
from megatron_vlm.io.atomic import (
    MARK,
    NEW,
    check_partial,
    discard_partials,
    partial_of,
    read_mark,
    try_lock,
    write_mark,
    write_text,
)
from megatron_vlm.io.untrusted import what_is_at
from megatron_vlm.report.metrics_lines import SAMPLES

HELD_OUT_LIST = "held_out.txt"  # the records that data.split holds out
# Files that a run overwrites or appends to.
_FILES = ("config.yaml", "metrics.jsonl", SAMPLES, "examples.json", "report.html", HELD_OUT_LIST)
JOB_LOCK = "job.lock"
_ENDED, _FAILED = "ended", "failed: "
_MAX_BYTES = 4096
_MAX_REASON = 1000  # characters
_PATIENCE_S = 5  # for an earlier job of the run to release the folder
_PATIENCE_AFTER_RESTART_S = 60  # A file server releases a dead machine's locks late.


@dataclass(frozen=True)
class RunLock:
    """Facts about the run that its folder holds."""

    run: str  # id of the run
    last_serial: int  # serial of the last checkpoint when the job first started


@contextmanager
def held_folder(cfg: Config) -> Iterator[RunLock]:
    """Claim cfg.run, which is created if necessary, and write config.yaml into it. Anything else in
    a place where the run would write is refused. Only one rank does this."""
    folder = Path(cfg.run)
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_free(folder)
            _check_ways(cfg)
            held.enter_context(hold_job_lock(folder))
            claim = _claim(folder)
            check_leftovers(folder / "checkpoints", claim.run)
            discard_partials((folder / "checkpoints").glob("step-*.partial"), claim.run)
            for name in ("export", "merged"):
                discard_partials([partial_of(folder / name)], claim.run)
            for target in export_folders(cfg).values():
                check_partial(partial_of(target), claim.run)
                check_replaceable(target, claim.run)
            write_text(folder / "config.yaml", to_yaml(cfg))
        except OSError as error:
            raise ConfigError(
                f"cannot be written: {error.strerror}",
                key="run",
                found=cfg.run,
                allowed="another folder",
            ) from error
        yield claim


def export_folders(cfg: Config) -> dict[Exported, Path]:
    """Return the folder of each export of a run: `export`, and `merged` for a second one."""
    run = Path(cfg.run)
    return dict(zip(exports(cfg), (run / "export", run / "merged"), strict=False))


def _check_free(folder: Path) -> None:
    """Refuse a folder that is not the folder of a run and has files that a run would overwrite."""
    taken = [name for name in (*_FILES, "predictions", MARK) if (folder / name).exists()]
    if taken and _run_mark(folder) is None:
        raise ConfigError(
            f"is not the folder of a run, and has {taken[0]}, which a run would overwrite",
            key="run",
            found=str(folder),
            allowed="another folder",
        )


def _check_ways(cfg: Config) -> None:
    """Refuse anything in the place of a file or a folder that the run will write, even if only at
    its end. Exports and checkpoints are checked separately."""
    folder = Path(cfg.run)
    predictions = [f"predictions/{name}.jsonl" for name in held_out_names(cfg)]
    # They are written under another name first.
    whole = ["config.yaml", "examples.json", HELD_OUT_LIST, MARK, *predictions]
    files = (JOB_LOCK, *_FILES, *whole, *(name + NEW for name in whole))
    ways = dict.fromkeys(("checkpoints", "predictions", "tensorboard", "profile"), "a folder")
    for name, expected in {**ways, **dict.fromkeys(files, "a file")}.items():
        path = folder / name
        if (kind := _found_at(path)) not in ("nothing", expected):
            raise ConfigError(
                f": {path} is {kind}, and the run would write {expected} there",
                key="run",
                found=str(folder),
                remedy="move it somewhere else, or give another folder",
            )


def _found_at(path: Path) -> str:
    """Return the result of `what_is_at`, except that a link that leads nowhere is not "nothing"."""
    try:
        kind = what_is_at(path)
    except OSError:  # links in a circle, or a file in place of the folder above
        kind = "nothing"
    return "a link that leads nowhere" if kind == "nothing" and path.is_symlink() else kind


def _run_mark(folder: Path) -> dict[str, Any] | None:
    mark = read_mark(folder)
    return mark if mark is not None and mark.get("kind") == "run" else None


def _claim(folder: Path) -> RunLock:
    mark = _run_mark(folder)
    if mark is not None and restarts():
        return RunLock(mark["run"], mark["last_serial"])
    run = uuid.uuid4().hex if mark is None else mark["run"]
    claim = RunLock(run, last_serial(folder / "checkpoints"))
    write_mark(folder, run, kind="run", last_serial=claim.last_serial)
    return claim


@dataclass(frozen=True)
class Job:
    """The job that writes a run, or was the last to do so."""

    is_running: bool
    has_ended: bool = False  # in an orderly way
    failure: str | None = None  # why it ended


@contextmanager
def hold_job_lock(folder: Path) -> Iterator[None]:
    """Lock the folder, which one job may write, at most until the process ends."""
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
    """Return the job of a run folder; None without a readable job.lock that is no link."""
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
