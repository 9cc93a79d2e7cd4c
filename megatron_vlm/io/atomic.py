"""Folders that this program writes. They appear whole or not at all, and files of other programs
are never removed.

    NAME           complete
    NAME.partial   being written, or left by a crash
    NAME.aside1    the former NAME, where this program may not remove it

A mark in each folder, megatron_vlm.json, has the id of the run that wrote it.

The scratch folder in TMPDIR has the files that a process writes for itself alone. It is removed
with the process; a killed process's folder is removed when the next one makes its own. Sockets are
there, too, unless its name is too long for them. A lock tells whether a folder's process is alive.
Process ids do not: they are reused, and containers that share TMPDIR count their own.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from multiprocessing import current_process, util
from pathlib import Path
from typing import Any

from megatron_vlm.errors import CheckpointError, ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile

MARK = "megatron_vlm.json"
NEW = ".new"  # suffix of a file that is being written
blake2b = partial(hashlib.blake2b, digest_size=32)  # hasher for the digest of a file
_log = logging.getLogger(__name__)


def partial_of(folder: Path) -> Path:
    """Return the path of a folder while it is being written."""
    return folder.with_name(folder.name + ".partial")


def write_mark(folder: Path, run: str | None, **facts: Any) -> None:
    """Mark the folder, in place of a former mark. `run` is None for content of no run."""
    write_text(folder / MARK, json.dumps({"run": run, **facts}, indent=1) + "\n")
    sync(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file in place of a former one, whole or not at all."""
    new = path.with_name(path.name + NEW)
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextmanager
def replaced_file(path: Path, is_synced: bool = False) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of `path` at the end. After an error the
    former file stays. Other users may read the file, as they may read one that is just opened."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=NEW)
    os.close(handle)
    new = Path(name)
    try:
        yield new
        if is_synced:
            with new.open("rb") as file:
                os.fsync(file.fileno())
        new.chmod(0o644)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the mark of a folder; None where there is no readable mark."""
    try:
        mark = UntrustedFile(str(folder / MARK)).json().value
    except DataError:
        return None
    return mark if isinstance(mark, dict) and "run" in mark else None


def try_lock(handle: int, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False where another lock excludes this one."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK  # otherwise this file system has no locks
    return True


def digest_of(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, blake2b).hexdigest()


def begin(folder: Path, run: str | None) -> Path:
    """Make the marked empty folder to write into, in place of one that a crash of this run left."""
    new = partial_of(folder)
    check_partial(new, run)
    try:
        if new.exists():
            _remove(new)
        new.mkdir(parents=True)
        write_mark(new, run)
    except OSError as error:
        raise CheckpointError(
            f"cannot be created: {error.strerror}",
            place=str(new),
            remedy="give a folder that can be written to",
        ) from error
    return new


def check_partial(partial: Path, run: str | None) -> None:
    """Refuse to write over a file or folder that this run did not write."""
    if os.path.lexists(partial) and not _is_ours(partial, run):
        raise CheckpointError(
            "is in the way, and this run did not write it",
            place=str(partial),
            remedy="move it somewhere else",
        )


def put_in_place(folder: Path) -> Path | None:
    """Turn the partial folder into the complete one; return where a former one was moved aside."""
    aside = None
    try:
        if os.path.lexists(folder):
            names = (folder.with_name(f"{folder.name}.aside{n}") for n in count(1))
            aside = next(path for path in names if not os.path.lexists(path))
            folder.rename(aside)
        partial_of(folder).rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"is complete but cannot be renamed to {folder.name}: {error.strerror}",
            place=str(partial_of(folder)),
            remedy="allow renaming in the folder that contains it",
        ) from error
    return aside


def asides_of(folder: Path) -> list[Path]:
    """Return the paths that were moved aside from this folder's name and still exist."""
    if not folder.parent.is_dir():
        return []
    return sorted(p for p in folder.parent.iterdir() if p.name.startswith(f"{folder.name}.aside"))


def discard(folder: Path) -> None:
    """Remove a folder that this program wrote. A failure is logged, and harmless."""
    try:
        _remove(folder)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", folder, error.strerror)


def discard_partials(paths: Iterable[Path], run: str | None) -> None:
    """Remove the partial folders that this run wrote."""
    for path in paths:
        if _is_ours(path, run):
            discard(path)


def sync(folder: Path) -> None:
    """Sync a folder to the disk. Names reach the disk with the folder, not with the file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_ours(partial: Path, run: str | None) -> bool:
    """Return whether this run wrote the folder. The mark shows it. A folder without other files
    counts, too: a crash came before the mark was written or after all but the mark was removed.
    Files and links do not count."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    if {path.name for path in partial.iterdir()} <= {MARK, MARK + NEW}:
        return True
    mark = read_mark(partial)
    return mark is not None and mark["run"] == run


def _remove(folder: Path) -> None:
    """Remove a folder, and its mark last. After a crash in between, the mark still shows who wrote
    the rest."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


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
