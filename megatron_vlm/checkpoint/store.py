"""Checkpoint folders: written whole or not at all, verified by digests, found and pruned.

    run_folder/step-00000012/          complete: every file is on the disk and its digest is known
    run_folder/step-00000016.partial/  being written, or what a crash left; never read
    run_folder/step-00000012.old/      the former step-00000012, if a crash came while replacing it

Files only: no torch, no collectives. In a distributed run, one rank calls these.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.errors import CheckpointError, ConfigError

COMPLETE = "complete.json"  # written last: a folder without it is no checkpoint
_STEP = re.compile(r"step-(\d{8,})(\.old)?")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """What is known about a written file."""

    name: str
    size: int
    blake2b: str


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is stored; `find_latest` and `keep` see only such names."""
    return Path(run_folder) / f"step-{step:08d}"


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return folder.with_name(folder.name + ".partial")


def begin(folder: Path) -> Path:
    """Make the empty folder to write into; what a crash left there is removed."""
    partial = partial_of(folder)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{partial} cannot be created: {error.strerror}; give a folder that can be written to"
        ) from error
    return partial


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write, digest and fsync a file."""
    hasher, size = _hasher(), 0
    try:
        with open(path, "wb") as file:
            for chunk in chunks:
                hasher.update(chunk)
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}, after {size:,} bytes; free space there "
            "or give another folder. No earlier checkpoint was touched"
        ) from error
    return FileRecord(path.name, size, hasher.hexdigest())


def commit(folder: Path, records: Iterable[FileRecord]) -> None:
    """Turn the partial folder with these files into the complete one, in a single rename.

    What earlier crashes left in the run folder is removed.
    """
    partial, old = partial_of(folder), folder.with_name(folder.name + ".old")
    records = list(records)
    _check_sizes(partial, records)
    write_file(partial / COMPLETE, [_render(records).encode()])
    try:
        if folder.exists():
            # A crash between the two renames leaves the old one under a name that is found too.
            if old.exists():
                shutil.rmtree(old)
            folder.rename(old)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{partial} is complete but cannot be renamed to {folder.name}: {error.strerror}; "
            "the run folder must allow renaming"
        ) from error
    for path in folder.parent.iterdir():
        if path == old or path.name.endswith(".partial"):
            discard(path)


def discard(folder: Path) -> None:
    """Remove a folder that is not a checkpoint; a failure is logged, and harmless."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", folder, error.strerror)


def verify(folder: Path, share: slice = slice(None)) -> None:
    """Read every file again and compare its digest; raises CheckpointError with the name of the
    file that is missing, truncated or changed. `share`: only these of the files, by name."""
    folder = Path(folder)
    records = sorted(_records(folder), key=lambda record: record.name)[share]
    _check_sizes(folder, records)
    with ThreadPoolExecutor(max_workers=8) as threads:  # hashing leaves the GIL to the others
        for record, digest in zip(
            records, threads.map(lambda r: _digest(folder / r.name), records), strict=True
        ):
            if digest != record.blake2b:
                raise CheckpointError(
                    f"{folder / record.name} has changed since it was written: its digest is "
                    f"{digest[:16]}..., and was {record.blake2b[:16]}...; use another checkpoint"
                )


def find_latest(run_folder: Path) -> Path | None:
    """The newest checkpoint that is complete and whose every file is as it was written.

    Reads all of it. What is skipped is logged as a warning, with the reason.
    """
    for folder in whole_ones(run_folder):
        try:
            verify(folder)
        except CheckpointError as error:
            pass_over(folder, error)
        else:
            return folder
    return None


def whole_ones(run_folder: Path) -> list[Path]:
    """The checkpoints whose files all have the right size, newest first; `verify` reads them."""
    run_folder, found = Path(run_folder), []
    for path in sorted(run_folder.glob("*.partial")):
        _log.warning("skipped %s: it was never completed", path)
    for folder in reversed(_folders(run_folder)):
        try:
            _check_sizes(folder, _records(folder))
        except CheckpointError as error:
            pass_over(folder, error)
        else:
            found.append(folder)
    return found


def pass_over(folder: Path, error: Exception) -> None:
    """Log that a checkpoint is not used, and why."""
    _log.warning("skipped %s: %s", folder, error)


def keep(
    run_folder: Path, keep_last: int, keep_every: int | None = None, best: int | None = None
) -> list[Path]:
    """Remove the checkpoints that are neither among the newest `keep_last`, nor of a step that
    `keep_every` divides, nor of the step `best`; returns what was removed.

    A folder that lacks a file or part of one is left alone and does not count.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"checkpoint.{name}={value} must be at least 1")
    whole = [folder for folder in _folders(Path(run_folder)) if _is_whole(folder)]
    removed = []
    for folder in whole[:-keep_last]:
        step = _step_of(folder)
        if step == best or (keep_every is not None and step % keep_every == 0):
            continue
        # Under its own name a half-removed folder would look like a damaged checkpoint.
        doomed = partial_of(folder)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)
        folder.rename(doomed)
        discard(doomed)
        removed.append(folder)
    return removed


def _folders(run_folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, oldest step first; of one step, the replaced first."""
    if not run_folder.exists():
        return []
    if not run_folder.is_dir():
        raise CheckpointError(f"{run_folder} is a file; give the folder that holds step-*")
    found = [path for path in run_folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step_of(path), not path.name.endswith(".old")))


def _step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def _is_whole(folder: Path) -> bool:
    try:
        _check_sizes(folder, _records(folder))
    except CheckpointError:
        return False
    return True


def _check_sizes(folder: Path, records: Iterable[FileRecord]) -> None:
    for record in records:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be found: {error.strerror}; all nodes must share the folder, and "
                "a checkpoint must be copied whole"
            ) from error
        if size != record.size:
            raise CheckpointError(
                f"{path} has {size:,} bytes instead of {record.size:,}; use another checkpoint"
            )


def _records(folder: Path) -> list[FileRecord]:
    """What complete.json lists; it holds a digest of itself."""
    path = folder / COMPLETE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; the checkpoint was never completed"
        ) from error
    try:
        files = json.loads(text)["files"]
        records = [FileRecord(name, size, digest) for name, (size, digest) in files.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        records = []
    if _render(records).encode() != text:
        raise CheckpointError(f"{path} has changed since it was written; use another checkpoint")
    return records


def _render(records: Iterable[FileRecord]) -> str:
    files = {r.name: [r.size, r.blake2b] for r in sorted(records, key=lambda r: r.name)}
    hasher = _hasher()
    hasher.update(json.dumps(files).encode())
    return json.dumps({"files": files, "blake2b": hasher.hexdigest()}, indent=1) + "\n"


def _hasher() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=32)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, _hasher).hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; use another checkpoint"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Names reach the disk with the folder, not with the file: sync it as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
