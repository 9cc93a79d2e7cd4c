"""Mark of an export's folder: its origin, and the sizes and digests of its files. A folder is
replaced only if it is unchanged since then. write_export.py writes the folder."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from megatron_vlm.errors import CheckpointError
from megatron_vlm.io.atomic import MARK, digest_of, read_mark, write_mark, write_text

CARD = "README.md"  # the model card
_THREADS = 8


@dataclass(frozen=True)
class ExportMark:
    """Origin of the weights of an export."""

    run: str | None  # id of the run
    step: int
    checkpoint: str  # id of the checkpoint, see checkpoint/manifest.py
    # The digest of the weights that an adapter was trained with.
    base: str | None = field(default=None, compare=False)
    base_type: str | None = field(default=None, compare=False)  # lora.base of that training


def finish_mark(folder: Path, mark: ExportMark | None) -> None:
    """Mark a folder whose files are written. Without `mark` only the export remains in it."""
    if mark is None:
        (folder / MARK).unlink()
        return
    content = _content(folder)
    with ThreadPoolExecutor(_THREADS) as threads:  # the new files are cached in memory
        digests = list(threads.map(digest_of, content.values()))
    facts: dict[str, Any] = {"step": mark.step, "checkpoint": mark.checkpoint}
    bases = {"base": mark.base, "base_type": mark.base_type}
    facts |= {key: value for key, value in bases.items() if value is not None}
    facts["files"] = {name: path.stat().st_size for name, path in content.items()}
    facts["digests"] = dict(zip(content, digests, strict=True))
    write_mark(folder, mark.run, **facts)


def read_export_mark(folder: Path) -> ExportMark | None:
    """Return the mark, or None if no run exported this folder or the export has lost a file."""
    mark = read_mark(folder)
    try:
        if mark is None or any(not (folder / name).is_file() for name in mark["files"]):
            return None
        bases = mark.get("base"), mark.get("base_type")
        return ExportMark(mark["run"], mark["step"], mark["checkpoint"], *bases)
    except (KeyError, TypeError):
        return None


def changed_file(folder: Path, since_ns: int = 0) -> str | None:
    """Return the first file that is not as it was written, of those changed since `since_ns`."""
    mark = read_mark(folder) or {}
    sizes, digests = mark.get("files", {}), mark.get("digests", {})

    def is_changed(name: str) -> bool:
        path = content[name]
        if path.is_dir() or path.is_symlink() or path.stat().st_size != sizes.get(name):
            return True
        return path.stat().st_ctime_ns >= since_ns and digest_of(path) != digests.get(name)

    content = _content(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(compress(content, threads.map(is_changed, content)), None)


def add_to_card(folder: Path, title: str, text: str) -> None:
    """Add a section to the model card of a marked export, in place of a former one. The export
    stays as its run wrote it, so that a later one may replace it. A card that someone has changed
    is left alone."""
    card, mark = folder / CARD, read_mark(folder)
    if mark is None or CARD not in mark.get("digests", {}) or not card.is_file():
        return
    if digest_of(card) != mark["digests"][CARD]:
        return
    begin, end = f"<!-- {title} -->\n", f"<!-- {title} end -->\n"
    before, _, rest = card.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    section = f"{begin}\n## {title}\n\n{text}\n{end}"
    write_text(card, f"{before.rstrip()}\n\n{section}{after}")
    mark["files"][CARD], mark["digests"][CARD] = card.stat().st_size, digest_of(card)
    facts = {key: value for key, value in mark.items() if key != "run"}
    write_mark(folder, mark["run"], **facts)


def check_replaceable(folder: Path, run: str | None) -> None:
    """Refuse to export into a folder that holds anything but an earlier export of this run. The
    mark was written last, so files that have not been touched since are unchanged and are not read
    again."""
    if not os.path.lexists(folder):
        return
    place = str(folder)
    if not folder.exists():
        raise CheckpointError("is a link that leads nowhere", place=place, remedy="remove it")
    if not folder.is_dir():
        raise CheckpointError("is a file", place=place, remedy="choose a new folder for the export")
    if not _content(folder):
        return
    mark = read_mark(folder)
    if run is None or mark is None or mark["run"] != run:
        raise CheckpointError(
            "is not empty", place=place, remedy="choose a new folder for the export"
        )
    name = changed_file(folder, (folder / MARK).stat().st_ctime_ns)
    if name is not None:
        raise CheckpointError(
            f"would be replaced by a new export, but this run did not write {name} as it is now",
            place=place,
            remedy="move that file, or the folder, somewhere else",
        )


def is_replaceable(folder: Path, run: str | None) -> bool:
    """Return whether a folder holds nothing but an earlier export of this run."""
    try:
        check_replaceable(folder, run)
    except CheckpointError:
        return False
    return True


def _content(folder: Path) -> dict[str, Path]:
    """Return the files, however deep, and empty folders or links, by their names in the folder."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path != folder / MARK
        and (path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    }
