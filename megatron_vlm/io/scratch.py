"""A folder in TMPDIR for what a process writes for itself alone. It goes with the process; what
killed ones have left goes when the next one makes its own. Sockets are there, too, unless its name
is too long for them: then they have a folder of their own, elsewhere.

A lock tells whether a folder's process is alive, wherever it runs on this machine: process ids do
not, as they come again, and containers that share TMPDIR count their own.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from functools import cache
from multiprocessing import current_process, util
from pathlib import Path

from megatron_vlm.errors import ConfigError

_PREFIX = "megatron_vlm-"
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # where sockets may be if TMPDIR is too long for them
_LONGEST = 107 - 37  # bytes: Linux takes 107 as the name of a socket; vLLM's are a slash and a UUID
_OWNER = "owner.lock"  # says on which machine; locked as long as the process lives


def scratch_folder() -> Path:
    """This process's folder."""
    return _folder_of(os.getpid(), tempfile.gettempdir())


def keep_sockets_in_scratch() -> None:
    """Python's worker processes, and those that they start, make their sockets there, too."""
    current_process()._config.setdefault("tempdir", str(socket_folder()))  # type: ignore


def socket_folder() -> Path:
    """A folder for sockets that only this user can enter. Names without a folder, Linux's abstract
    ones, would be open to everybody on the machine."""
    if _has_room(folder := scratch_folder()):
        return folder
    for parent in _SHORT:
        with contextlib.suppress(OSError):
            if _has_room(short := _folder_of(os.getpid(), parent)):
                return short
    raise ConfigError(
        f": the name of a socket in {folder} is longer than Linux allows, and none of "
        f"{', '.join(_SHORT)} can be written",
        key="TMPDIR",
        found=tempfile.gettempdir(),
        remedy="set TMPDIR to a folder with a name of at most "
        f"{_LONGEST - len(folder.name) - 1} bytes",
    )


def _has_room(folder: Path) -> bool:
    return len(os.fsencode(folder)) <= _LONGEST


@cache
def _folder_of(_: int, parent: str) -> Path:
    """One for each process: a fork has this module with what its parent remembers."""
    remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # Never closed: the lock ends with the process.
    handle = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, _here())
    # As Python's own folder of sockets goes: after all that is in it was closed.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
    return folder


def remove_left(parent: str) -> None:
    """Remove the folders of processes of this user and machine that are gone."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is somebody's who lives, or not one of ours
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(handle, 1024) == _here():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _here() -> bytes:
    return socket.gethostname().encode()
