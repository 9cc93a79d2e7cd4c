"""The folder of a run: marked as the run's, and locked by one job at a time."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.checkpoint.retention import check_leftovers, last_serial
from megatron_vlm.config import to_yaml
from megatron_vlm.config.evaluation_checks import held_out_names
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported, exports
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.export_folder import check_replaceable
from megatron_vlm.io.atomic import (
    MARK,
    NEW,
    check_partial,
    discard_partials,
    partial_of,
    read_mark,
    write_mark,
    write_text,
)
from megatron_vlm.io.untrusted import what_is_at
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.run.job_lock import JOB_LOCK, hold_job_lock

HELD_OUT_LIST = "held_out.txt"  # the records that data.split holds out
# Files that a run overwrites or appends to.
_FILES = ("config.yaml", "metrics.jsonl", SAMPLES, "examples.json", "report.html", HELD_OUT_LIST)
_RUN_FILES = (*_FILES, "predictions")


@dataclass(frozen=True)
class RunLock:
    """Facts about the run that its folder holds."""

    run: str  # id of the run
    last_serial: int  # serial of the last checkpoint when the job first started


@contextmanager
def held_folder(cfg: Config) -> Iterator[RunLock]:
    """Claim cfg.run, which is created if necessary, and write config.yaml into it. Anything else in
    a place where the run would write is refused. Only one rank does this."""
    folder = Path(cfg.run)
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_free(folder)
            _check_ways(cfg)
            held.enter_context(hold_job_lock(folder))
            claim = _claim(folder)
            check_leftovers(folder / "checkpoints", claim.run)
            discard_partials((folder / "checkpoints").glob("step-*.partial"), claim.run)
            for name in ("export", "merged"):
                discard_partials([partial_of(folder / name)], claim.run)
            for target in export_folders(cfg).values():
                check_partial(partial_of(target), claim.run)
                check_replaceable(target, claim.run)
            write_text(folder / "config.yaml", to_yaml(cfg))
        except OSError as error:
            raise ConfigError(
                f"cannot be written: {error.strerror}",
                key="run",
                found=cfg.run,
                allowed="another folder",
            ) from error
        yield claim


def export_folders(cfg: Config) -> dict[Exported, Path]:
    """Return the folder of each export of a run: `export` for the first, and `merged` next to it
    for a merged one."""
    kinds = exports(cfg)
    return {
        kind: Path(cfg.run) / ("merged" if place else "export") for place, kind in enumerate(kinds)
    }


def _check_free(folder: Path) -> None:
    """Refuse a folder that is not the folder of a run and has files that a run would overwrite."""
    taken = [name for name in (*_RUN_FILES, MARK) if (folder / name).exists()]
    if taken and _run_mark(folder) is None:
        raise ConfigError(
            f"is not the folder of a run, and has {taken[0]}, which a run would overwrite",
            key="run",
            found=str(folder),
            allowed="another folder",
        )


def _check_ways(cfg: Config) -> None:
    """Refuse anything in the place of a file or a folder that the run will write, even if only at
    its end. Exports and checkpoints are checked separately."""
    folder = Path(cfg.run)
    predictions = [f"predictions/{name}.jsonl" for name in held_out_names(cfg)]
    whole = [
        "config.yaml",
        "examples.json",
        HELD_OUT_LIST,
        MARK,
        *predictions,
    ]  # written under another name first
    files = (JOB_LOCK, *_FILES, *whole, *(name + NEW for name in whole))
    ways = dict.fromkeys(("checkpoints", "predictions", "tensorboard", "profile"), "a folder")
    for name, expected in {**ways, **dict.fromkeys(files, "a file")}.items():
        path = folder / name
        if (kind := _found_at(path)) not in ("nothing", expected):
            raise ConfigError(
                f": {path} is {kind}, and the run would write {expected} there",
                key="run",
                found=str(folder),
                remedy="move it somewhere else, or give another folder",
            )


def _found_at(path: Path) -> str:
    """Return the result of `what_is_at`, except that a link that leads nowhere is not "nothing"."""
    try:
        kind = what_is_at(path)
    except OSError:  # links in a circle, or a file in place of the folder above
        kind = "nothing"
    return "a link that leads nowhere" if kind == "nothing" and path.is_symlink() else kind


def _run_mark(folder: Path) -> dict[str, Any] | None:
    mark = read_mark(folder)
    return mark if mark is not None and mark.get("kind") == "run" else None


def _claim(folder: Path) -> RunLock:
    mark = _run_mark(folder)
    if mark is not None and restarts():
        return RunLock(mark["run"], mark["last_serial"])
    run = uuid.uuid4().hex if mark is None else mark["run"]
    claim = RunLock(run, last_serial(folder / "checkpoints"))
    write_mark(folder, run, kind="run", last_serial=claim.last_serial)
    return claim
