"""Stop and resume of runs from a page, for who has the token."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from megatron_vlm.commands.watch.run_status import FAILED_RUN, KILLED, STOPPED_RUN, RunStatus
from megatron_vlm.distributed.process import without_job
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import MARK, read_mark
from megatron_vlm.io.untrusted import home_path, real_path
from megatron_vlm.run.job_lock import JOB_LOCK, Job, read_job

_MIN_TOKEN = 20  # characters
_COMMANDS = ("train", "rl")  # the commands that a page may start again
_OUTPUT = "resumed.log"  # in the run folder


def read_token(path: str) -> str:
    """Return the token in a file, which is made if there is none."""
    file = home_path(path)
    try:
        if not os.path.lexists(file):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(file, flags, 0o600), "w", encoding="utf-8") as new:
                new.write(secrets.token_urlsafe(32) + "\n")
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot be read or made: {error}",
            key="--control",
            found=path,
            remedy="give a file of your own for the token; it is made if there is none",
        ) from error
    if len(token) < _MIN_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise ConfigError(
            f"has no token of at least {_MIN_TOKEN} characters without blanks",
            key="--control",
            found=path,
            remedy="give a file that does not exist, and a token is made",
        )
    return token


def stop_run(folder: Path) -> str:
    """Ask the job of a run to save and stop; return what was done. Refuse it where the job is not
    on this machine, or not what job.lock says."""
    job = read_job(folder)
    if job is None or not job.is_running:
        raise DataError("is not running", place=folder.name)
    if not job.is_here or job.process is None:
        raise DataError(
            f"runs on {job.host or 'another machine'}",
            place=folder.name,
            remedy=f"stop it there: kill -TERM {job.process}" if job.process else "stop it there",
        )
    if not _has_lock(job, folder):
        raise DataError(
            f"is not written by process {job.process}, which its job.lock names",
            place=folder.name,
            remedy="stop it where it was started, with Ctrl-C",
        )
    try:
        os.kill(job.process, signal.SIGTERM)
    except OSError as error:
        raise DataError(
            f"process {job.process} cannot be stopped: {error.strerror}", place=folder.name
        ) from error
    return "It saves a checkpoint after its step and stops."


def _has_lock(job: Job, folder: Path) -> bool:
    """Return whether the process has job.lock open, as far as this system tells."""
    links = Path(f"/proc/{job.process}/fd")
    if not links.parent.parent.is_dir():
        return True
    lock = str(real_path(folder / JOB_LOCK))
    try:
        return any(os.readlink(link) == lock for link in links.iterdir())
    except OSError:
        return False


def resume_command(folder: Path) -> tuple[list[str], Path] | None:
    """Return the words after `megatron-vlm` that start a run again, and the folder to start them
    in; None if the run does not record how our own launcher started it."""
    if (folder / MARK).is_symlink() or not (folder / "config.yaml").is_file():
        return None
    mark = read_mark(folder) or {}
    command, started_in = mark.get("command"), mark.get("started_in")
    if command not in _COMMANDS or not isinstance(started_in, str) or not started_in:
        return None
    config = str(folder / "config.yaml")
    words = [command, "--config", config, f"run={folder}", "checkpoint.resume=auto"]
    return words, Path(started_in)


def resume_words(folder: Path, status: RunStatus) -> str | None:
    """Return what a person types to go on with a run that ended too early; None for others."""
    if not can_resume(status) or (found := resume_command(folder)) is None:
        return None
    words, started_in = found
    return f"cd {shlex.quote(str(started_in))} && megatron-vlm {shlex.join(words)}"


def can_resume(status: RunStatus) -> bool:
    """Return whether a run has ended before its end."""
    return status.state in (STOPPED_RUN, KILLED, FAILED_RUN)


def resume_run(folder: Path, status: RunStatus) -> "subprocess.Popen[bytes]":
    """Start a run again with its own configuration. It does not end with this process."""
    found = resume_command(folder)
    if not can_resume(status) or found is None:
        why = f"is {status.state}" if not can_resume(status) else "does not record how it started"
        raise DataError(
            why, place=folder.name, remedy="start it again where it was started, with its command"
        )
    words, started_in = found
    output = os.open(
        folder / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
    )
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_vlm.cli", *words],
            cwd=started_in,
            env=without_job(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise DataError(f"cannot be started: {error}", place=folder.name) from error
    finally:
        os.close(output)
