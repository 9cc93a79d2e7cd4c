"""Files as bytes: their digests, their lines, and compressed ones unpacked."""

import codecs
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from megatron_vlm.errors import ConfigError, DataError

_WHOLE_DIGEST = 2**30  # larger files are digested in samples
_SAMPLE = 2**20


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
            f"{path} is unpacked into data.cache_dir, which is null; set it, or unpack it yourself"
        )
    target = cache / "unpacked" / f"{file_digest(path)}.jsonl"
    if target.exists():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        # Arrow's readers: those of gzip and zstandard silently accept a truncated zst file.
        with pyarrow.input_stream(path) as packed, open(partial, "wb") as plain:
            while block := packed.read(2**20):
                plain.write(block)
    except Exception as error:  # each library raises its own
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be unpacked: {error}; is it complete?") from error
    os.replace(partial, target)
    return str(target)


def scan_lines(path: str, hasher: Any) -> tuple[np.ndarray, np.ndarray]:
    """The [start, end) of each line that is not blank, and its number, from 1."""
    breaks, offset = [], 0
    with open(path, "rb") as file:
        mark = 3 if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(0)
        while block := file.read(2**24):
            hasher.update(block)
            breaks.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + offset)
            offset += len(block)
    ends = np.concatenate([*breaks, [offset]]).astype(np.int64)
    starts = np.concatenate([[mark], ends[:-1] + 1])
    # Only short lines can be blank: look at those alone.
    keep = ends > starts
    with open(path, "rb") as file:
        for index in np.flatnonzero(keep & (ends - starts < 8)).tolist():
            file.seek(starts[index])
            keep[index] = bool(file.read(ends[index] - starts[index]).strip())
    return np.stack([starts, ends], axis=1)[keep], np.flatnonzero(keep) + 1
