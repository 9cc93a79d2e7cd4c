"""What an export says of itself: its run, step and checkpoint, and which files it has."""

from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.errors import CheckpointError
from megatron_vlm.folders import MARK, read_mark, write_mark


@dataclass(frozen=True)
class ExportMark:
    """Where the weights of an export are from."""

    run: str | None  # the id of the run
    step: int
    checkpoint: str  # the id of the checkpoint, see checkpoint/manifest.py


def finish_mark(folder: Path, mark: ExportMark | None) -> None:
    """Mark a folder whose files are written; without `mark` nothing but the export stays in it."""
    if mark is None:
        (folder / MARK).unlink()
        return
    files = {path.name: path.stat().st_size for path in _content(folder)}
    write_mark(folder, mark.run, step=mark.step, checkpoint=mark.checkpoint, files=files)


def read_export_mark(folder: Path) -> ExportMark | None:
    """None for what was not exported by a run, and for an export that has lost a file."""
    mark = read_mark(folder)
    try:
        if mark is None or any(not (folder / name).is_file() for name in mark["files"]):
            return None
        return ExportMark(mark["run"], mark["step"], mark["checkpoint"])
    except (KeyError, TypeError):
        return None


def check_replaceable(folder: Path, run: str | None) -> None:
    """Refuse to export into a folder that holds anything but an earlier export of this run."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose a new folder for the export")
    content = {path.name: path for path in _content(folder)}
    if not content:
        return
    mark = read_mark(folder)
    if run is None or mark is None or mark["run"] != run:
        raise CheckpointError(f"{folder} is not empty; choose a new folder for the export")
    files = mark.get("files", {})
    for name, path in sorted(content.items()):
        if path.is_dir() or path.is_symlink() or path.stat().st_size != files.get(name):
            raise CheckpointError(
                f"{folder} would be replaced by a new export, but this run did not write {name} as "
                "it is there now: move it, or the folder, somewhere else"
            )


def is_replaceable(folder: Path, run: str | None) -> bool:
    """Whether it holds nothing but an earlier export of this run."""
    try:
        check_replaceable(folder, run)
    except CheckpointError:
        return False
    return True


def _content(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != MARK]
