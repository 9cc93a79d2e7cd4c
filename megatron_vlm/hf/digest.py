"""Digests that show whether ranks on different machines, or a run that resumes, have the same model
and settings."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.companion_files import SETTINGS
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint, read_header, weight_files
from megatron_vlm.io.untrusted import UntrustedFile

# Number and size of the blocks that are read from each tensor: 32B in fp32 are 128 GB, their blocks
# 18 MB. Training changes values all over a tensor, so other weights differ in some block.
_BLOCKS = 4
_BLOCK = 4096


def digests(source: HFCheckpoint) -> dict[str, str]:
    """Return a digest of every file that affects training: of the whole file for settings, and of
    the size, the header and blocks of each tensor for weight files."""
    digests_by_file = settings_digests(source.path)
    for file in weight_files(source.path):
        digests_by_file[file.relative_to(source.path).as_posix()] = weight_file_digest(file)
    return digests_by_file


def weights_digest(folder: Path) -> str:
    """Return a single digest of all weight files of a checkpoint, independent of its folder."""
    hasher = hashlib.sha256()
    for file in weight_files(folder):
        hasher.update(f"{file.name} {weight_file_digest(file)}\n".encode())
    return hasher.hexdigest()


def settings_digests(folder: Path) -> dict[str, str]:
    """Return a digest of config.json and of each file that determines how a record becomes tokens
    and patches."""
    return {
        name: hashlib.sha256(_untrusted_file(folder / name).content()).hexdigest()
        for name in SETTINGS
        if os.path.lexists(folder / name)
    }


def _untrusted_file(file: Path) -> UntrustedFile:
    return UntrustedFile(str(file), CheckpointError, "download the checkpoint again")


def weight_file_digest(file: Path) -> str:
    """Return a digest of a file's size, its header and blocks of each of its tensors."""
    header = read_header(file)
    with (
        _untrusted_file(file).wrap_errors("cannot be read"),
        open(file, "rb", buffering=0) as opened,
    ):
        descriptor = opened.fileno()
        size = os.fstat(descriptor).st_size
        hasher = hashlib.sha256(repr((size, sorted(header.items()))).encode())
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # prevents read-ahead
        start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        for _, info in sorted(header.items()):
            first, last = (start + offset for offset in info["data_offsets"])
            for place, length in _blocks(first, last):
                hasher.update(os.pread(descriptor, length, place))
    return hasher.hexdigest()


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield places and sizes of blocks spread over [first, last), including both ends."""
    if last - first <= _BLOCKS * _BLOCK:
        yield first, last - first
        return
    for number in range(_BLOCKS):
        yield first + number * (last - first - _BLOCK) // (_BLOCKS - 1), _BLOCK
