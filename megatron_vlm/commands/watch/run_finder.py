"""Run folders under the folders that are watched. Links are not followed, so nothing outside of
these is shown."""

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import MARK, read_mark
from megatron_vlm.io.untrusted import home_path, real_path, what_is_at
from megatron_vlm.run.run_folder import JOB_LOCK

_MAX_DEPTH = 4  # levels from a watched folder to a run
_MAX_FOLDERS = 20_000  # folders that are searched
_LOGS = ("metrics.jsonl", JOB_LOCK)


def watched_folders(paths: Sequence[str]) -> list[Path]:
    """Return the folders of the command line; refuse a path that is no folder."""
    folders = []
    for path in paths:
        try:
            kind = what_is_at(home_path(path))
        except (OSError, ValueError):
            kind = "nothing"
        if kind != "a folder":
            problem = "does not exist" if kind == "nothing" else f"is {kind}"
            raise ConfigError(
                problem,
                key="RUNS",
                found=str(path),
                remedy="give a folder with runs, or the folder of a run: what training got as run=",
            )
        folders.append(real_path(home_path(path)))
    return list(dict.fromkeys(folders))


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the run folders by their names: their paths below a watched folder. With several
    watched folders, its own name comes first."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _run_folders(folder):
            below = path.relative_to(folder).as_posix()
            name = folder.name if below == "." else below
            if len(folders) > 1 and below != ".":
                name = f"{folder.name}/{below}"
            name = name.encode(errors="replace").decode()  # as an address can have it
            while name in found:
                name += "'"
            found[name] = path
    return found


def _run_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is the folder of a run, or else those below it."""
    runs, places = [], deque([(folder, 0)])
    for _ in range(_MAX_FOLDERS):
        if not places:
            break
        path, depth = places.popleft()
        try:
            with os.scandir(path) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:  # it has gone meanwhile, or may not be read
            continue
        if _is_run(path, names):
            runs.append(path)
        elif depth < _MAX_DEPTH:
            inner = sorted(name for name, is_folder in names.items() if is_folder)
            places += [(path / name, depth + 1) for name in inner if not name.startswith(".")]
    return runs


def _is_run(path: Path, names: dict[str, bool]) -> bool:
    if any(name in names for name in _LOGS):
        return True
    return MARK in names and (read_mark(path) or {}).get("kind") == "run"
