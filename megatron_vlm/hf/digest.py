"""Digests by which ranks on different machines, and a run that resumes, tell whether they have the
same model and settings."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.companion_files import SETTINGS
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint, read_header, weight_files
from megatron_vlm.io.untrusted import UntrustedFile

# Of each tensor so many blocks are read: 32B in fp32 are 128 GB, their blocks 18 MB. Training
# changes values all over a tensor, so other weights differ in some block.
_BLOCKS = 4
_BLOCK = 4096


def digests(source: HFCheckpoint) -> dict[str, str]:
    """A digest of every file that decides what is trained: settings whole; of weight files the
    size, the header and blocks of each tensor."""
    found = settings_digests(source.path)
    for file in weight_files(source.path):
        found[file.relative_to(source.path).as_posix()] = _of_weights(file)
    return found


def weights_digest(source: HFCheckpoint) -> str:
    """One digest of all files of weights, whatever folder they are in."""
    hasher = hashlib.sha256()
    for file in weight_files(source.path):
        hasher.update(f"{file.name} {_of_weights(file)}\n".encode())
    return hasher.hexdigest()


def settings_digests(folder: Path) -> dict[str, str]:
    """A digest of each file that decides how a record becomes tokens and patches, and of
    config.json."""
    return {
        name: hashlib.sha256(_outside(folder / name).content()).hexdigest()
        for name in SETTINGS
        if os.path.lexists(folder / name)
    }


def _outside(file: Path) -> UntrustedFile:
    return UntrustedFile(str(file), CheckpointError, "download the checkpoint again")


def _of_weights(file: Path) -> str:
    header = read_header(file)
    with _outside(file).border("cannot be read"), open(file, "rb", buffering=0) as opened:
        descriptor = opened.fileno()
        size = os.fstat(descriptor).st_size
        hasher = hashlib.sha256(repr((size, sorted(header.items()))).encode())
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
        start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        for _, info in sorted(header.items()):
            first, last = (start + offset for offset in info["data_offsets"])
            for place, length in _blocks(first, last):
                hasher.update(os.pread(descriptor, length, place))
    return hasher.hexdigest()


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Places and sizes of blocks spread over [first, last), its two ends among them."""
    if last - first <= _BLOCKS * _BLOCK:
        yield first, last - first
        return
    for number in range(_BLOCKS):
        yield first + number * (last - first - _BLOCK) // (_BLOCKS - 1), _BLOCK
