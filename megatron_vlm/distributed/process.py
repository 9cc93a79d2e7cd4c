"""One process of a job: its exit status, its errors in one sentence, how often it was restarted."""

import contextlib
import hashlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from megatron_vlm.errors import ConfigError, LostError, MegatronVLMError, sentence, show_value
from megatron_vlm.io.printable import visible

# Exit statuses of a process, and of the job that it belongs to.
FAILED = 1
MISTAKE = 2  # by the user, explained in one sentence: restarting would not help
UNLIKE = 3  # `agree` has found that engine and trainer differ: the command ends with 1
STUCK = 70  # a rank stopped making progress
PREEMPTED = 75  # saved after a signal: start again to resume
INTERRUPTED = 130  # Ctrl-C twice: nothing was saved

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # they ask to save and stop
STOPPED_EARLY = "stopped by a signal: there is nothing to save"

DEBUG = "MEGATRON_VLM_DEBUG"  # when set, errors keep their traceback
RESTART = "MEGATRON_VLM_RESTART"  # how often our own launchers restarted the job
SAID = "MEGATRON_VLM_SAID"  # a folder with a file for each error that a rank has said
SECRET = "MEGATRON_VLM_SECRET"  # of the job: without it seals only tell what was overwritten
LAUNCHER = "MEGATRON_VLM_LAUNCHER"  # the process id of the launcher, if it is ours

# Variables in which a launcher speaks to one rank, and the beginnings of others.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", SECRET)
_JOB = ("TORCHELASTIC_", "MASTER_", "GLOO_", "NCCL_ASYNC")


def without_job() -> dict[str, str]:
    """The environment for a process that is no rank: without what a launcher tells this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK and not name.startswith(_JOB)
    }


def under_launcher() -> bool:
    """Whether torchrun (or Slurm, or Ray) started this process as one rank of a job. Variables
    that do not fit together are refused: alone, a rank would take its part for the whole."""
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
    """The rank of this process, as its launcher says; 0 for one that is alone."""
    return int(os.environ.get("RANK", "0"))


def world_of_process() -> int:
    """How many ranks its job has; 1 for one that is alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def new_secret() -> str:
    """For the ranks of one job."""
    return secrets.token_hex(16)


def restarts() -> int:
    """How often this job was restarted after a failure, by us or by torchrun."""
    return int(os.environ.get(RESTART) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def run_process(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run the command as one process of a job; return its exit status."""
    with ended_by_signals():
        status = guarded(command, arguments)
        if status not in (FAILED, MISTAKE) and "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
        return status


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """In the body, signals that ask to stop end the process at once, with PREEMPTED, as there is
    nothing to save: not yet, or no more. Whoever can save handles them himself meanwhile."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, _end_early) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_early(_: int, __: FrameType | None) -> None:
    """Without SystemExit: raised amid imports, it is often caught or ignored by others' code."""
    if _is_first_to_say(STOPPED_EARLY):
        say(STOPPED_EARLY)
    os._exit(PREEMPTED)


def guarded(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """The command's exit status; a user's mistake is reported in one sentence."""
    try:
        return command(arguments)
    except (MegatronVLMError, OSError) as error:
        text = sentence(error)
        if text is None or os.environ.get(DEBUG):
            raise
        if _is_first_to_say(text):
            say(f"rank {os.environ.get('RANK', '0')}: {text}")
        return FAILED if isinstance(error, LostError) else MISTAKE
    except KeyboardInterrupt:
        say("stopped at once, nothing was saved")
        return INTERRUPTED


def _is_first_to_say(text: str) -> bool:
    """Whether no other rank of this attempt and machine has said the same. What differs is always
    said, and so is everything where the launcher has given no folder to tell."""
    folder = _folder_of_attempt()
    if folder is None:
        return True
    try:
        with open(folder / hashlib.sha256(text.encode()).hexdigest(), "x"):
            return True
    except FileExistsError:
        return False
    except OSError:
        return True


def _folder_of_attempt() -> Path | None:
    """Our launcher's, or that in which torchrun gives each rank a folder of its own."""
    if (ours := os.environ.get(SAID)) is not None:
        return Path(ours)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[1]


def say(text: str) -> None:
    """Tell the user, on stderr. A message may quote paths and records, which others wrote."""
    print(f"megatron-vlm: {visible(text)}", file=sys.stderr, flush=True)
