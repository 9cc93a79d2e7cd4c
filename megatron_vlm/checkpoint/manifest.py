"""Manifest of a checkpoint, complete.json: its files, the run that wrote them, and the checkpoints
that came before. This module needs files only: no torch, no collectives.

Digests show whether the files, and complete.json itself, are unchanged. A reader has a shared lock
on complete.json, and a run removes a checkpoint only under an exclusive one."""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.errors import CheckpointError, DataError
from megatron_vlm.io.atomic import MARK, blake2b, digest_of, sync, try_lock
from megatron_vlm.io.untrusted import JsonField, UntrustedFile, reason, require_file

COMPLETE = "complete.json"  # written last: a folder without it is not a checkpoint


@dataclass(frozen=True)
class FileRecord:
    """Name, size and digest of a written file."""

    name: str
    size: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """Content of complete.json. If no run wrote a checkpoint, only its files are known."""

    files: tuple[FileRecord, ...]
    run: str | None = None  # id of the run that wrote it
    serial: int = 0  # number of the write to the folder of checkpoints, independent of the step
    line: tuple[str, ...] = ()  # ids of its predecessors that are in the folder, oldest first

    @property
    def id(self) -> str:
        """Id of the checkpoint, which is the same for the same files."""
        return _digest_of(_sizes_and_digests(self.files))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write, digest and fsync a file."""
    hasher, size = blake2b(), 0
    try:
        with open(path, "wb") as file:
            for chunk in chunks:
                hasher.update(chunk)
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror}, after {size:,} bytes",
            place=str(path),
            remedy="free space there or give another folder. No earlier checkpoint was touched",
        ) from error
    return FileRecord(path.name, size, hasher.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write complete.json; every file that it lists must be there."""
    check_sizes(folder, manifest.files)
    write_file(folder / COMPLETE, [_render(manifest).encode()])


def read_manifest(folder: Path) -> Manifest:
    """Read complete.json. Raise CheckpointError if it is missing or has changed."""
    path = folder / COMPLETE
    if not os.path.lexists(path):
        raise CheckpointError("cannot be read: the checkpoint was never completed", place=str(path))
    file = UntrustedFile(str(path), CheckpointError, "use another checkpoint")
    text = file.content()
    changed = CheckpointError(
        "has changed since it was written", place=str(path), remedy="use another checkpoint"
    )
    try:
        manifest = _parse(JsonField(file.parse(text), "", file))
    except CheckpointError as error:
        raise changed from error
    if _render(manifest).encode() != text:
        raise changed
    return manifest


def check_sizes(folder: Path, records: Iterable[FileRecord]) -> None:
    """Refuse a folder in which a file is missing or truncated."""
    for record in records:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"cannot be found: {error.strerror}",
                place=str(path),
                remedy="all nodes must share the folder, and a checkpoint must be copied whole",
            ) from error
        if size != record.size:
            raise CheckpointError(
                f"has {size:,} bytes instead of {record.size:,}",
                place=str(path),
                remedy="use another checkpoint",
            )


def verify(folder: Path, share: slice = slice(None)) -> Manifest:
    """Read every file again, compare its digest and return the content of complete.json. Raise
    CheckpointError with the name of a file that is missing, truncated or changed. `share` selects
    some of the files, in the order of their names."""
    manifest = read_manifest(folder)
    records = sorted(manifest.files, key=lambda record: record.name)[share]
    check_sizes(folder, records)
    with ThreadPoolExecutor(max_workers=8) as threads:  # hashing releases the GIL
        for record, digest in zip(
            records, threads.map(lambda r: _digest(folder / r.name), records), strict=True
        ):
            if digest != record.blake2b:
                raise CheckpointError(
                    "has changed since it was written: its digest is "
                    f"{digest[:16]}..., and was {record.blake2b[:16]}...",
                    place=str(folder / record.name),
                    remedy="use another checkpoint",
                )
    return manifest


def foreign_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names in a checkpoint's folder that are not part of the checkpoint."""
    known = {MARK, COMPLETE, *(record.name for record in manifest.files)}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _parse(raw: JsonField) -> Manifest:
    files = []
    for name, field in raw["files"].object().items():
        if name != Path(name).name or name in ("", ".."):
            raise field.error("an entry for a file in the folder of the checkpoint")
        if len(facts := field.items()) != 2:
            raise field.error("a size and a digest")
        files.append(FileRecord(name, facts[0].whole(), facts[1].string()))
    if raw.get("serial") is None:
        return Manifest(tuple(files))
    line = tuple(each.string() for each in raw["line"].items())
    run = raw.get("run")
    return Manifest(
        tuple(files), None if run is None else run.string(), raw["serial"].whole(), line
    )


def _render(manifest: Manifest) -> str:
    content: dict[str, Any] = {"files": _sizes_and_digests(manifest.files)}
    digest = manifest.id
    if manifest.serial:
        content |= {"run": manifest.run, "serial": manifest.serial, "line": list(manifest.line)}
        digest = _digest_of(content)
    return json.dumps(content | {"blake2b": digest}, indent=1) + "\n"


def _sizes_and_digests(files: Iterable[FileRecord]) -> dict[str, Any]:
    return {r.name: [r.size, r.blake2b] for r in sorted(files, key=lambda r: r.name)}


def _digest_of(content: dict[str, Any]) -> str:
    return blake2b(json.dumps(content).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        require_file(path)
        return digest_of(path)
    except (OSError, DataError) as error:
        raise CheckpointError(
            f"cannot be read: {reason(error)}", place=str(path), remedy="use another checkpoint"
        ) from error


@contextmanager
def hold_for_reading(folder: Path) -> Iterator[bool]:
    """Keep a checkpoint in place; yield False if it is gone or being removed."""
    path = folder / COMPLETE
    with ExitStack() as opened:
        try:
            handle = _open_file(path, os.O_RDONLY, opened)
            # Another checkpoint may have taken its name before the lock was there.
            is_held = try_lock(handle, shared=True) and os.path.samestat(
                os.stat(path), os.fstat(handle)
            )
        except OSError:
            is_held = False
        yield is_held


@contextmanager
def hold_for_removal(folder: Path) -> Iterator[bool]:
    """Keep readers away from a checkpoint; yield False while it has one."""
    with ExitStack() as opened:
        try:
            # Over NFS an exclusive lock needs a writable file.
            is_free = try_lock(_open_file(folder / COMPLETE, os.O_RDWR, opened))
        except OSError:  # an unlockable file may still be removable
            is_free = True
        yield is_free


def _open_file(path: Path, flags: int, opened: ExitStack) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    opened.callback(os.close, handle)
    return handle
