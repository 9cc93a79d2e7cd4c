"""Read locks that keep a checkpoint in place while it is read, even if a run no longer needs it and
would remove it. A reader has a shared lock on complete.json, and a remover needs an exclusive one.

This module needs files only: no torch, no collectives.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_vlm.checkpoint.manifest import COMPLETE
from megatron_vlm.io.atomic import try_lock


@contextmanager
def hold_for_reading(folder: Path) -> Iterator[bool]:
    """Keep a checkpoint in place; yield False if it is gone or being removed."""
    path = Path(folder) / COMPLETE
    with ExitStack() as opened:
        try:
            handle = _open_file(path, os.O_RDONLY, opened)
            # Another checkpoint may have taken its name before the lock was there.
            is_held = try_lock(handle, shared=True) and _is_at(path, handle)
        except OSError:
            is_held = False
        yield is_held


@contextmanager
def hold_for_removal(folder: Path) -> Iterator[bool]:
    """Keep readers away from a checkpoint that is to be removed; yield False while it has a
    reader."""
    with ExitStack() as opened:
        try:
            # Over NFS an exclusive lock needs a writable file.
            is_free = try_lock(_open_file(Path(folder) / COMPLETE, os.O_RDWR, opened))
        except OSError:  # an unlockable file may still be removable
            is_free = True
        yield is_free


def _open_file(path: Path, flags: int, opened: ExitStack) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    opened.callback(os.close, handle)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    return os.path.samestat(os.stat(path), os.fstat(handle))
