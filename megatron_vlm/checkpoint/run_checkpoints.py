"""The checkpoints of a run: they are written whole or not at all, found, and pruned.

    step-00000012/          complete: every file is on the disk and its digest is known
    step-00000016.partial/  being written, or left over from a crash; never read
    step-00000012.aside1/   a checkpoint of the same step that is not in the line of the new one

Training continues from one checkpoint to the next: this is a line. A run that resumes from an
earlier checkpoint starts a new line; checkpoints of other lines are neither counted nor removed.
This module needs files only: in a distributed run, one rank calls it."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_vlm.checkpoint.manifest import (
    COMPLETE,
    FileRecord,
    Manifest,
    check_sizes,
    foreign_files,
    hold_for_reading,
    hold_for_removal,
    read_manifest,
    verify,
    write_manifest,
)
from megatron_vlm.errors import CheckpointError
from megatron_vlm.io import atomic

_STEP = re.compile(r"step-(\d{8,})(\.aside\d+)?")
_PARTIAL = "step-*.partial"
_log = logging.getLogger(__name__)


def step_folder(checkpoints_folder: Path, step: int) -> Path:
    """Return the folder for the checkpoint of a step; only such names are found and pruned."""
    return checkpoints_folder / f"step-{step:08d}"


def commit(
    folder: Path,
    records: Iterable[FileRecord],
    run_id: str | None = None,
    parent: Manifest | None = None,
) -> Manifest:
    """Turn the partial folder with these files into the complete one, in a single rename.

    The run `run_id` wrote the checkpoint and continued from the checkpoint `parent`. An older one
    of the same name is put aside. It is removed only where it has the same content or belongs to
    no run. Leftovers of this run's crashes in the same folder are removed.
    """
    manifest = Manifest(tuple(records))
    if run_id is not None:
        present = {manifest.id for _, manifest in _manifests(folder.parent)}
        before = () if parent is None else (*parent.line, parent.id)
        line = tuple(name for name in before if name in present)
        serial = 1 + max(last_serial(folder.parent), 0 if parent is None else parent.serial)
        manifest = Manifest(manifest.files, run_id, serial, line)
    write_manifest(atomic.partial_of(folder), manifest)
    aside = atomic.put_in_place(folder)
    if aside is not None:
        old = _manifest_of(aside)
        same = old is not None and (run_id is None or old.id == manifest.id)
        if old is not None and same and _is_all_ours(aside, old, run_id):
            atomic.discard(aside)
        else:
            _log.warning("moved the former content of %s to %s", folder, aside.name)
    atomic.discard_partials(folder.parent.glob(_PARTIAL), run_id)
    return manifest


def check_leftovers(checkpoints_folder: Path, run_id: str) -> None:
    """Refuse a folder of checkpoints in which a foreign file or folder has a name that a write
    would need."""
    for partial in sorted(checkpoints_folder.glob(_PARTIAL)):
        atomic.check_partial(partial, run_id)


def find_checkpoint(path: Path) -> Path:
    """Return the folder itself, or the newest complete one of a run or of its checkpoints."""
    with held_checkpoint(path) as folder:
        return folder


@contextmanager
def held_checkpoint(path: Path) -> Iterator[Path]:
    """Yield the folder of `find_checkpoint` and keep it in place until the end, even while a run
    trains and removes checkpoints."""
    with ExitStack() as reading:
        if (path / COMPLETE).is_file():
            reading.enter_context(hold_for_reading(path))
            yield path
            return
        for folder in (path / "checkpoints", path):
            if folder.is_dir() and (latest := hold_latest(folder, reading)) is not None:
                yield latest
                return
        raise CheckpointError(
            "is neither a complete checkpoint nor a run that has one",
            place=str(path),
            remedy=_remedy_beside(path),
        )


def _remedy_beside(path: Path) -> str:
    """Return the remedy for a folder that is no checkpoint: those that its run still has."""
    is_step = _STEP.fullmatch(path.name) and path.parent.is_dir()
    names = sorted(each.name for each in complete_checkpoints(path.parent)) if is_step else []
    if not names:
        return "give RUN or RUN/checkpoints/step-..."
    return f"{path.parent} has {', '.join(names)}: give one of these"


def hold_latest(checkpoints_folder: Path, reading: ExitStack) -> Path | None:
    """Return the checkpoint that was written last among those that are complete and whose files are
    all unchanged, which `reading` keeps in place. All of its files are read. A skipped checkpoint
    is logged as a warning, with the reason."""
    has_changed = True
    while has_changed:  # a training run removes some checkpoints, and then has newer ones
        has_changed = False
        for folder in complete_checkpoints(checkpoints_folder):
            with ExitStack() as lock:
                if not lock.enter_context(hold_for_reading(folder)):
                    has_changed = True
                    continue
                try:
                    verify(folder)
                except CheckpointError as error:
                    has_changed = has_changed or not folder.exists()  # removed before the lock
                    skip_damaged(folder, error)
                    continue
                reading.enter_context(lock.pop_all())
                return folder
    return None


def complete_checkpoints(checkpoints_folder: Path, after: int = -1) -> list[Path]:
    """Return the checkpoints whose files all have the right size, with the last written one first;
    `verify` reads the files. Only serials `after` this one count."""
    complete = []
    for path in sorted(checkpoints_folder.glob(_PARTIAL)):
        _log.warning("skipped %s: it was never completed", path)
    for folder in _folders(checkpoints_folder):
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest.files)
        except CheckpointError as error:
            skip_damaged(folder, error)
        else:
            complete.append((manifest.serial, _step_of(folder), not _was_replaced(folder), folder))
    return [folder for serial, *_, folder in sorted(complete, reverse=True) if serial > after]


def last_serial(checkpoints_folder: Path) -> int:
    """Return the last serial of the checkpoints here, including damaged ones; 0 without any."""
    return max((manifest.serial for _, manifest in _manifests(checkpoints_folder)), default=0)


def skip_damaged(folder: Path, error: Exception) -> None:
    """Log that a checkpoint is not used, and the reason."""
    _log.warning("skipped %s: %s", folder, error)


def other_lines(checkpoints_folder: Path, head: Manifest | None) -> list[Path]:
    """Return the checkpoints here from which training did not lead to `head`, or all of them
    without a head."""
    manifests = _manifests(checkpoints_folder)
    in_line = {folder for folder, manifest in manifests if _in_line(manifest, head)}
    return [folder for folder in _folders(checkpoints_folder) if folder not in in_line]


def is_in_line(folder: Path, head: Manifest) -> bool:
    """Return whether a folder is a whole checkpoint of the line that ends with `head`."""
    manifest = _manifest_of(folder)
    return manifest is not None and _in_line(manifest, head) and _is_whole(folder, manifest)


def prune(
    checkpoints_folder: Path,
    head: Manifest,
    keep_last: int,
    keep_every: int | None = None,
    best: int | None = None,
) -> list[Path]:
    """Remove checkpoints of the line that ends with `head`, and return the removed ones. A
    checkpoint stays if it is among the newest `keep_last`, if `keep_every` divides its step, or if
    its step is `best`.

    Checkpoints of other lines and other runs, and those with a missing or truncated file, stay and
    do not count. A checkpoint whose folder contains a foreign file stays as well.
    """
    assert keep_last > 0 and keep_every != 0, "the configuration has neither"
    line = [
        (folder, manifest)
        for folder, manifest in _manifests(checkpoints_folder)
        if manifest.run == head.run and _in_line(manifest, head) and _is_whole(folder, manifest)
    ]
    # A crash may leave a replaced checkpoint next to its identical replacement.
    in_place = {manifest.id for folder, manifest in line if not _was_replaced(folder)}
    twins = [each for each in line if _was_replaced(each[0]) and each[1].id in in_place]
    line = [each for each in line if each not in twins]

    def is_wanted(step: int) -> bool:
        return step == best or (keep_every is not None and step % keep_every == 0)

    doomed = twins + [each for each in line[:-keep_last] if not is_wanted(_step_of(each[0]))]
    return [
        folder
        for folder, manifest in doomed
        if _is_all_ours(folder, manifest, head.run) and _retire(folder, head.run)
    ]


def _retire(folder: Path, run_id: str | None) -> bool:
    """Remove a checkpoint. It is renamed first, because a half-removed one would look damaged under
    its own name."""
    doomed = atomic.partial_of(folder)
    try:
        atomic.check_partial(doomed, run_id)
        if doomed.exists():
            atomic.discard(doomed)
        with hold_for_removal(folder) as nobody_reads:
            if not nobody_reads:
                _log.info("%s is being read, and is removed later", folder)
                return False
            folder.rename(doomed)
    except (CheckpointError, OSError) as error:
        _log.warning("%s is no longer needed, and cannot be removed: %s", folder, error)
        return False
    atomic.discard(doomed)
    return True


def _in_line(manifest: Manifest, head: Manifest | None) -> bool:
    """Return whether a checkpoint is in the line that ends with `head`. Checkpoints without a
    serial, which no run numbered, count as one line."""
    if head is None:
        return False
    return manifest.serial == head.serial == 0 or manifest.id in (*head.line, head.id)


def _is_all_ours(folder: Path, manifest: Manifest, run_id: str | None) -> bool:
    """Return whether the folder holds only files that this run wrote."""
    if foreign := foreign_files(folder, manifest):
        _log.warning("%s is kept: this run did not write %s in it", folder, ", ".join(foreign))
    return not foreign and manifest.run == run_id


def _manifests(checkpoints_folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints here with a readable manifest, oldest step first."""
    pairs = [(folder, _manifest_of(folder)) for folder in _folders(checkpoints_folder)]
    return [(folder, manifest) for folder, manifest in pairs if manifest is not None]


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def _folders(checkpoints_folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name by step; of one step, the replaced ones first."""
    if not checkpoints_folder.exists():
        return []
    if not checkpoints_folder.is_dir():
        raise CheckpointError(
            "is a file", place=str(checkpoints_folder), remedy="give the folder that holds step-*"
        )
    folders = [path for path in checkpoints_folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: (_step_of(path), not _was_replaced(path), path.name))


def _step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def _was_replaced(folder: Path) -> bool:
    return "." in folder.name


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    try:
        check_sizes(folder, manifest.files)
    except CheckpointError:
        return False
    return True
