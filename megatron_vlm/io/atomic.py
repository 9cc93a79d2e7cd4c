"""Folders that this program writes. They appear whole or not at all, and what others have put
there is never removed.

    NAME           complete
    NAME.partial   being written, or what a crash left of it
    NAME.aside1    what had the name before, where it is not ours to remove

A mark in each, megatron_vlm.json, has the id of the run that wrote it.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_vlm.errors import CheckpointError, DataError
from megatron_vlm.io.untrusted import UntrustedFile

MARK = "megatron_vlm.json"
NEW = ".new"  # ends the name of a file that is being written
_log = logging.getLogger(__name__)


def partial_of(folder: Path) -> Path:
    """Where a folder is while it is being written."""
    return folder.with_name(folder.name + ".partial")


def write_mark(folder: Path, run: str | None, **facts: Any) -> None:
    """Mark the folder, in place of a mark that it may have. `run` is None for what was not written
    by a training run."""
    write_text(folder / MARK, json.dumps({"run": run, **facts}, indent=1) + "\n")
    sync(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file in place of a former one: whole, or not at all."""
    new = path.with_name(path.name + NEW)
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The mark of a folder; None where there is none that can be read."""
    try:
        mark = UntrustedFile(str(folder / MARK)).json().value
    except DataError:
        return None
    return mark if isinstance(mark, dict) and "run" in mark else None


def try_lock(handle: int, shared: bool = False) -> bool:
    """Whether an open file is locked now, which it is until it is closed; False where somebody else
    has a lock that excludes this one."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK  # or this file system has no locks
    return True


def digest_of(path: Path) -> str:
    """The digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, blake2b).hexdigest()


def blake2b() -> "hashlib.blake2b":
    """Takes bytes for the digest of a file."""
    return hashlib.blake2b(digest_size=32)


def begin(folder: Path, run: str | None) -> Path:
    """Make the marked empty folder to write into. What a crash left of it is removed, if this run
    has written it."""
    partial = partial_of(folder)
    check_partial(partial, run)
    try:
        if partial.exists():
            _remove(partial)
        partial.mkdir(parents=True)
        write_mark(partial, run)
    except OSError as error:
        raise CheckpointError(
            f"cannot be created: {error.strerror}",
            place=str(partial),
            remedy="give a folder that can be written to",
        ) from error
    return partial


def check_partial(partial: Path, run: str | None) -> None:
    """Refuse to write where something is that this run did not write."""
    if os.path.lexists(partial) and not _is_ours(partial, run):
        raise CheckpointError(
            "is in the way, and this run did not write it",
            place=str(partial),
            remedy="move it somewhere else",
        )


def put_in_place(folder: Path) -> Path | None:
    """Turn the partial folder into the complete one. What had its name before, if anything, is put
    aside and returned."""
    aside = None
    try:
        if os.path.lexists(folder):
            aside = _free_name(folder)
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
    """What had the name of this folder before and is still there."""
    if not folder.parent.is_dir():
        return []
    return sorted(p for p in folder.parent.iterdir() if p.name.startswith(f"{folder.name}.aside"))


def discard(folder: Path) -> None:
    """Remove a folder that is ours; a failure is logged, and harmless."""
    try:
        _remove(folder)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", folder, error.strerror)


def discard_partials(paths: Iterable[Path], run: str | None) -> None:
    """Remove those of these partial folders that this run wrote."""
    for path in paths:
        if _is_ours(path, run):
            discard(path)


def sync(folder: Path) -> None:
    """Names reach the disk with the folder, not with the file: sync it as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_ours(partial: Path, run: str | None) -> bool:
    """Whether the mark says so, or a crash came before the mark was written or after all but the
    mark was removed. Files and links are not."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    if {path.name for path in partial.iterdir()} <= {MARK, MARK + NEW}:
        return True
    mark = read_mark(partial)
    return mark is not None and mark["run"] == run


def _remove(folder: Path) -> None:
    """The mark goes last: after a crash in between, the rest can still be told to be ours."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


def _free_name(folder: Path) -> Path:
    number = 1
    while os.path.lexists(path := folder.with_name(f"{folder.name}.aside{number}")):
        number += 1
    return path
