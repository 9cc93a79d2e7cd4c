"""A checkpoint that is being read stays, also where a run would remove it, which it does with those
that it no longer needs: a reader has a shared lock on complete.json, and whoever removes it needs
one that nobody shares.

Files only: no torch, no collectives.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_vlm.checkpoint.manifest import COMPLETE
from megatron_vlm.io.atomic import try_lock


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Keep a checkpoint where it is; False where it has gone or is going."""
    path = Path(folder) / COMPLETE
    with ExitStack() as opened:
        try:
            handle = _opened(path, os.O_RDONLY, opened)
            # Its name may have gone to another one before there was a lock.
            is_held = try_lock(handle, shared=True) and _is_at(path, handle)
        except OSError:
            is_held = False
        yield is_held


@contextmanager
def free(folder: Path) -> Iterator[bool]:
    """Keep readers from a checkpoint that is to be removed; False where somebody reads it."""
    with ExitStack() as opened:
        try:
            # Over NFS such a lock needs a file that may be written.
            is_free = try_lock(_opened(Path(folder) / COMPLETE, os.O_RDWR, opened))
        except OSError:  # it may be removed all the same
            is_free = True
        yield is_free


def _opened(path: Path, flags: int, opened: ExitStack) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    opened.callback(os.close, handle)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    return os.path.samestat(os.stat(path), os.fstat(handle))
