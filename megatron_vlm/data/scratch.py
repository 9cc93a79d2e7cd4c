"""A folder in TMPDIR for what a process writes for itself alone. It goes with the process; what
killed ones have left goes when the next one makes its own.

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

_PREFIX = "megatron_vlm-"
_LONGEST = 107 - len("/listener-12345678")  # bytes: Linux takes 107 as the name of a socket
_OWNER = "owner.lock"  # says on which machine; locked as long as the process lives


def scratch_folder() -> Path:
    """This process's folder."""
    return _folder_of(os.getpid())


def keep_sockets_in_scratch() -> None:
    """Python's worker processes, and those that they start, make their sockets there, too, unless
    its name is too long for a socket's: then Python's own folder in TMPDIR serves."""
    folder = str(scratch_folder())
    if len(os.fsencode(folder)) <= _LONGEST:
        current_process()._config.setdefault("tempdir", folder)  # type: ignore


@cache
def _folder_of(_: int) -> Path:
    """One for each process: a fork has this module with what its parent remembers."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Never closed: the lock ends with the process.
    handle = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, _here())
    # As Python's own folder of sockets goes: after all that is in it was closed.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
    return folder


def remove_left() -> None:
    """Remove the folders of processes of this user and machine that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
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
