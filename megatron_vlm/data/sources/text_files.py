"""Files as bytes: their digests, and compressed ones unpacked."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.scratch import scratch_folder

_log = logging.getLogger("megatron_vlm.data")

_WHOLE_DIGEST = 2**30  # larger files are digested in samples
_SAMPLE = 2**20
# Text of chats unpacks to 3 to 20 times its size; a bomb, to 1000 times and more.
MAX_RATIO = 200
_ALWAYS = 64 * 2**20  # bytes that any file may unpack to


def file_digest(path: str) -> str:
    """A digest of a file's content, or of a very large one's size, time and evenly spaced parts."""
    stat = os.stat(path)
    hasher = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        if stat.st_size <= _WHOLE_DIGEST:
            return hashlib.file_digest(file, lambda: hasher).hexdigest()
        hasher.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for start in np.linspace(0, stat.st_size - _SAMPLE, 64).astype(int).tolist():
            file.seek(start)
            hasher.update(file.read(_SAMPLE))
    return hasher.hexdigest()


def unpacked(path: str, cache: Path | None) -> str:
    """The path of a plain file with the content; in the cache if this one is compressed, for that
    has no lines to seek to."""
    if not path.endswith((".gz", ".zst")):
        return path
    if cache is None:
        raise ConfigError(
            f": {path} is unpacked into it",
            key="data.cache_dir",
            found=None,
            remedy="set it, or unpack the file yourself",
        )
    target = cache / "unpacked" / f"{file_digest(path)}.jsonl"
    if os.path.exists(target):
        return str(target)
    try:
        return _unpack(path, target)
    except OSError as error:
        _log.warning("data.cache_dir is done without: %s cannot be written: %s", target, error)
    target = scratch_folder() / target.name
    try:
        return _unpack(path, target)
    except OSError as error:
        raise DataError(
            f"is unpacked into {target}, which cannot be written: {error}",
            place=path,
            remedy="free space there, set TMPDIR to another folder, or unpack it yourself",
        ) from error


def _unpack(path: str, target: Path) -> str:
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as plain:
            plain.writelines(content_of(path))
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return str(target)


def content_of(path: str) -> Iterator[bytes]:
    """The content of a file in blocks; it may be compressed, as its suffix says. A DataError where
    it is cut off, or where more comes out than can be right."""
    most, done = max(_ALWAYS, MAX_RATIO * os.path.getsize(path)), 0
    try:
        # Arrow's readers: those of gzip and zstandard silently accept a truncated zst file.
        with pyarrow.input_stream(path) as stream:
            while done <= most and (block := stream.read(_SAMPLE)):
                done += len(block)
                yield block
    except Exception as error:  # each library raises its own
        raise DataError(
            f"cannot be unpacked: {error}", place=path, remedy="check that it is complete"
        ) from error
    if done > most:
        raise DataError(
            f"unpacks to more than {most // 2**20} MiB, {MAX_RATIO} times its size or more",
            place=path,
            remedy="if that is right, unpack it yourself",
        )
