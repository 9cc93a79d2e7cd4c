"""A folder in TMPDIR for the files that a process writes for itself alone. It is removed with the
process; a killed process's folder is removed when the next one makes its own. Sockets are there,
too, unless its name is too long for them.

A lock tells whether a folder's process is alive. Process ids do not: they are reused, and
containers that share TMPDIR count their own."""

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
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # for sockets, if TMPDIR is too long for them
_LONGEST = 107 - 37  # bytes: Linux allows 107 for a socket's name; vLLM adds a slash and a UUID
_OWNER = "owner.lock"  # has the machine's name; locked as long as the process lives


def scratch_folder() -> Path:
    """Return the folder of this process."""
    return _folder_of(os.getpid(), tempfile.gettempdir())


def keep_sockets_in_scratch() -> None:
    """Make Python's worker processes, and those that they start, put their sockets there, too."""
    current_process()._config.setdefault("tempdir", str(socket_folder()))  # type: ignore


def socket_folder() -> Path:
    """Return a folder for sockets that only this user can enter. Linux's abstract names, which have
    no folder, would be open to everybody on the machine."""
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
    """Make a folder for each process. The cache is by process id, because a fork inherits the cache
    of its parent."""
    remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # The handle is never closed: the lock ends with the process.
    handle = os.open(folder / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks, where the folder stays
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, _host_name())
    # Python's own folder of sockets is removed likewise: after everything in it was closed.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
    return folder


def remove_left(parent: str) -> None:
    """Remove the folders of this user and machine whose processes are gone."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # its process lives, or it is another program's
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(handle, 1024) == _host_name():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _host_name() -> bytes:
    return socket.gethostname().encode()
