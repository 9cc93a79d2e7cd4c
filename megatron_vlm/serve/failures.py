"""Failures of calls as clients receive them, each blamed on the user or on the server; a
full disk, for which work waits, is neither."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from pydantic import ValidationError

from megatron_vlm.controller.rank_worker import BrokenError, WorkerError
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.device import lacks_memory
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import CheckpointError, ConfigError, DataError, MegatronVLMError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.serve.journal.journal_records import Failure
from megatron_vlm.serve.protocol.payloads import RequestError

USERS = (RequestError, DataError, ConfigError, ValidationError)
_NO_MEMORY = (
    "there is not enough memory for this call; send fewer or shorter datums, smaller pictures, or "
    "ask for fewer samples"
)
PAUSE_S = 0.5
REPEAT_WARNING_S = 60.0  # seconds between two warnings
# Exceptions that end the service. Its next start repeats what they interrupted from the journal.
ENDS_SERVICE = (BrokenError, Stopped)


class CallFailedError(WorkerError):
    """Failure of a call that its client did not cause. The service goes on."""


REFUSALS = (*USERS, CallFailedError)  # errors that reading a request may raise


@contextmanager
def undo_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` if the body raises an error after which the service goes on, and raise it."""
    try:
        yield
    except ENDS_SERVICE:
        raise
    except Exception:
        undo()
        raise


@contextmanager
def catch_error(report: Callable[[Exception], None]) -> Iterator[None]:
    """Give the body's error to `report`, and go on. Errors that end the service are raised."""
    try:
        yield
    except ENDS_SERVICE:
        raise
    except Exception as error:
        report(error)


def ended_session() -> Failure:
    """Return the failure of a sample whose session has ended."""
    return failure_of(RequestError(": the session has ended", key="sampling_session_id"))


def failure_of(error: Exception) -> Failure:
    """Return the error as a failure for the journal."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return Failure(f"{where}: {first['msg']}", "user")
    if not isinstance(error, MegatronVLMError):
        return Failure(_client_message(error), "server")
    user = isinstance(error, USERS) and not isinstance(error, CheckpointError)
    return Failure(str(error), "user" if user else "server")


def _is_of_collective(error: BaseException) -> bool:
    """Return whether a collective raised this error, which other ranks may have met, too."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and f"torch{os.sep}distributed{os.sep}" in frames[-1].filename
    named = any(name in str(error) for name in ("gloo", "NCCL"))
    return inside or named or isinstance(error, dist.DistError)


@dataclass(frozen=True)
class Trouble:
    """Record of an unexpected error. It does not keep the error itself, because the frames of the
    traceback hold all tensors of the computation."""

    message: str  # for the client
    in_collective: bool

    @staticmethod
    def from_error(error: BaseException) -> "Trouble":
        """Record the error, and print it for the operator of the service. The traceback is left out
        where memory has run out or the operating system has raised the error."""
        if lacks_memory(error) or isinstance(error, OSError):
            print_to_user(f"a call failed: {type(error).__name__}: {error}")
        else:
            print_to_user("a call failed by an error of this program; please report it:")
            for line in "".join(traceback.format_exception(error)).splitlines():
                print(escape_controls(line), file=sys.stderr, flush=True)
        return Trouble(_client_message(error), _is_of_collective(error))


def bare(error: Exception) -> Exception:
    """Return the error without its traceback, whose frames hold what was read, such as decoded
    pictures. Return a CallFailedError for an unexpected error."""
    if not isinstance(error, MegatronVLMError | ValidationError):
        return CallFailedError(Trouble.from_error(error).message)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _client_message(error: BaseException) -> str:
    """Return the message for the client, which contains no paths of this machine."""
    if lacks_memory(error):
        return _NO_MEMORY
    if isinstance(error, OSError):
        return f"the server could not do it: {error.strerror or type(error).__name__}"
    first = (str(error).splitlines() or [""])[0]
    return f"an error in the server: {type(error).__name__}: {first}"


class FullDisk:
    """Pause between attempts to write the journal, with a warning from time to time."""

    def __init__(self) -> None:
        self.warned_at = -REPEAT_WARNING_S

    def wait(self, error: Exception) -> None:
        """Wait a moment before the next attempt."""
        if time.monotonic() - self.warned_at >= REPEAT_WARNING_S:
            self.warned_at = time.monotonic()
            print_to_user(
                f"the journal cannot be written: {error}; free space there: work waits until then"
            )
        time.sleep(PAUSE_S)
