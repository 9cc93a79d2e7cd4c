"""Folders that this program writes. They appear whole or not at all, and files of other programs
are never removed.

    NAME           complete
    NAME.partial   being written, or left by a crash
    NAME.aside1    the former NAME, where this program may not remove it

A mark in each folder, megatron_vlm.json, has the id of the run that wrote it.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from megatron_vlm.errors import CheckpointError, DataError
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
