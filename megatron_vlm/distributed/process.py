"""Process of a job: its exit status, its errors in one sentence, and its number of restarts; and
programs in the Python of another environment, such as the one that has vLLM."""

import atexit
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from megatron_vlm.errors import ConfigError, LostError, MegatronVLMError, sentences, show_value
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.secret_text import hide_secrets

# Exit statuses of a process, and of its job.
FAILED = 1
MISTAKE = 2  # mistake of the user, explained in one sentence: a restart would not help
UNLIKE = 3  # `agree` found that engine and trainer differ: the command ends with 1
STUCK = 70  # a rank made no progress any more
PREEMPTED = 75  # saved after a signal: start again to resume
INTERRUPTED = 130  # Ctrl-C twice: nothing was saved

ON_ALL_RANKS = "is_on_all_ranks"  # attribute of an error that every rank raises

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # requests to save and stop
STOPPED_EARLY = "stopped by a signal: there is nothing to save"

DEBUG = "MEGATRON_VLM_DEBUG"  # when set, errors keep their traceback
RESTART = "MEGATRON_VLM_RESTART"  # number of restarts by our own launchers
ERRORS_FOLDER = "MEGATRON_VLM_SAID"  # folder with a file for each error that a rank has reported
SECRET = "MEGATRON_VLM_SECRET"  # secret of the job; without it signatures only detect overwrites
LAUNCHER = "MEGATRON_VLM_LAUNCHER"  # process id of our own launcher, if it started this process

# Variables of a launcher for one rank, and prefixes of others.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", SECRET)
_JOB = ("TORCHELASTIC_", "MASTER_", "GLOO_", "NCCL_ASYNC")

_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),  # gloo's words
    *("remote process exited", "communicator was aborted"),  # NCCL's
)


def without_job() -> dict[str, str]:
    """Return the environment of a process that is no rank, without the variables of a launcher."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK and not name.startswith(_JOB)
    }


def is_under_launcher() -> bool:
    """Return whether torchrun (or Slurm, or Ray) started this process as a rank of a job. Variables
    that contradict each other are refused, because a rank on its own would take its part for the
    whole."""
    rank, world = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None and world in (None, "1"):
        return False
    if rank is None or world is None or not 0 <= int(rank) < int(world):
        raise ConfigError(
            f"and WORLD_SIZE={show_value(world)} of the environment do not fit together",
            key="RANK",
            found=rank,
            remedy="start with torchrun, which sets RANK to 0 .. WORLD_SIZE-1, or unset both",
        )
    return True


def rank_of_process() -> int:
    """Return the rank of this process by its launcher's variables; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_of_process() -> int:
    """Return the number of ranks of the job; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def new_secret() -> str:
    """Return a new secret for the ranks of one job."""
    return secrets.token_hex(16)


def restarts() -> int:
    """Return the number of restarts of this job after a failure, by us or by torchrun."""
    return int(os.environ.get(RESTART) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def run_process(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run the command as one process of a job, and return its exit status."""
    with ended_by_signals():
        status = run_guarded(command, arguments)
        if "megatron_vlm.distributed.grid" in sys.modules:
            from megatron_vlm.distributed.grid import end_with_nccl, leave_world

            has_failed = status in (FAILED, MISTAKE)
            leave_world(has_failed)
            atexit.unregister(leave_world)  # it would not know that the command has failed
            if has_failed:
                end_with_nccl(status)
        return status


@contextlib.contextmanager
def stop_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals that ask the process to stop during the body. Only the main thread can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """End the process at once, with PREEMPTED, if a signal asks it to stop during the body: there
    is nothing to save yet, or no longer. Code that can save sets its own handlers meanwhile."""
    return stop_signals_to(_end_early)


def _end_early(_: int, __: FrameType | None) -> None:
    """End the process without SystemExit, which the code of others often catches or ignores when it
    is raised during imports."""
    print_stopped_early()
    os._exit(PREEMPTED)


def print_stopped_early() -> None:
    """Tell the user that a signal ends this process, unless another rank has done so."""
    if _is_first_to_say(STOPPED_EARLY):
        print_to_user(STOPPED_EARLY)


def run_guarded(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Return the command's exit status. A user's mistake is reported in one sentence."""
    try:
        return command(arguments)
    except (MegatronVLMError, OSError) as error:
        lines = sentences(error)
        if not lines or os.environ.get(DEBUG):
            raise
        for text in filter(_is_first_to_say, lines):
            print_to_user(f"rank {os.environ.get('RANK', '0')}: {text}")
        return FAILED if isinstance(error, LostError) else MISTAKE
    except RuntimeError as error:
        if not is_lost_peer(error) or os.environ.get(DEBUG):
            raise
        if LAUNCHER not in os.environ:  # our launcher names the rank that ended
            print_to_user(
                f"rank {os.environ.get('RANK', '0')}: another rank has ended, or cannot be reached "
                "any more; its own messages say why"
            )
        return FAILED
    except KeyboardInterrupt:
        print_to_user("stopped at once; nothing was saved")
        return INTERRUPTED


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def _is_first_to_say(text: str) -> bool:
    """Return whether no other rank of this attempt on this machine has reported the same text. It
    is also true if the launcher has set no folder for this."""
    folder, error_file = os.environ.get(ERRORS_FOLDER), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if folder is None and error_file is not None:  # torchrun's, with a folder for each rank
        folder = str(Path(error_file).parents[1])
    if folder is None:
        return True
    try:
        with open(Path(folder) / hashlib.sha256(text.encode()).hexdigest(), "x"):
            return True
    except FileExistsError:
        return False
    except OSError:
        return True


def print_to_user(text: str) -> None:
    """Print a message to the user on stderr. It may quote paths and records, which are
    untrusted, and arguments, in which there may be secrets."""
    print(f"megatron-vlm: {escape_controls(hide_secrets(text))}", file=sys.stderr, flush=True)


class CannotStartError(Exception):
    """A reason why a Python gives no answer."""


def environment_elsewhere(*prefixes: str) -> dict[str, str]:
    """Return the variables for another Python, without its like and those with a prefix."""
    unfit = ("PYTHON", *prefixes)
    return {name: value for name, value in without_job().items() if not name.startswith(unfit)}


def output_of(python: str, program: str, patience_s: float) -> str | None:
    """Return what a program prints in another Python; None if it fails. Raise CannotStartError if
    there is no such Python, or it does not answer in time."""
    try:
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=patience_s,
            env=environment_elsewhere(),
        )
    except OSError as error:
        raise CannotStartError(error.strerror) from error
    except subprocess.TimeoutExpired as error:
        raise CannotStartError("it does not answer") from error
    return None if done.returncode else done.stdout.strip()
