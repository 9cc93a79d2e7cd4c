"""Runs below the watched folders, the state of each (whether it runs, how far it is, and how it
ended), and its page. Links are not followed, so nothing outside of the folders is shown. The state
is read from the ends of files, so that many long runs are listed quickly. A request reads what is
new since the last one: nothing happens between two requests."""

import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import MARK, read_mark
from megatron_vlm.io.untrusted import UntrustedFile, home_path, real_path, reason, what_is_at
from megatron_vlm.report.bench_table import BENCH_FILE
from megatron_vlm.report.html import page_body
from megatron_vlm.report.metrics_lines import (
    SAMPLES,
    STOPPED,
    EventLine,
    RlLine,
    StartLine,
    StepLine,
    from_json,
)
from megatron_vlm.report.run.metrics_arrays import MAX_LINE, LoggedRun, MetricsReading
from megatron_vlm.report.run.page import run_report
from megatron_vlm.report.run.rl_samples import GrowingLines, SampleIndex
from megatron_vlm.report.sections import Note, Report
from megatron_vlm.run.run_folder import JOB_LOCK, Job, read_job

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
        has_log = any(name in names for name in _LOGS)
        if has_log or (MARK in names and (read_mark(path) or {}).get("kind") == "run"):
            runs.append(path)
        elif depth < _MAX_DEPTH:
            inner = sorted(name for name, is_folder in names.items() if is_folder)
            places += [(path / name, depth + 1) for name in inner if not name.startswith(".")]
    return runs


RUNNING, FINISHED, STOPPED_RUN, KILLED = "running", "finished", "stopped", "killed"
FAILED_RUN, BROKEN, BEING_WRITTEN = "failed", "broken", "being written"
STATES = (RUNNING, BEING_WRITTEN, FINISHED, STOPPED_RUN, KILLED, FAILED_RUN, BROKEN)
_WINDOW = 20  # steps, over which rates are means
_FILES = ("metrics.jsonl", SAMPLES, "examples.json", "config.yaml", BENCH_FILE, JOB_LOCK)
_STEP = b'{"kind": "step"'
_TOLD = (b'{"kind": "start"', b'{"kind": "event"', b'{"kind": "rl"')


@dataclass(frozen=True)
class RunStatus:
    """Facts of a run that the list shows. A figure that is not known is None."""

    state: str
    why: str = ""  # a sentence for a state that needs one
    step: int | None = None
    total: int | None = None
    figure: tuple[str, float] | None = None  # what tells how well it learns: its name and value
    tokens_per_s: float | None = None
    seconds_left: float | None = None
    changed: float = 0.0  # time of the last change of a file
    files: tuple[tuple[int, int], ...] = ()  # size and time of each, which tell a change

    @property
    def is_active(self) -> bool:
        return self.state in (RUNNING, BEING_WRITTEN)


class StatusReader:
    """Reader of the state of one run, which remembers up to where it has read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self._lines = GrowingLines(self.folder / "metrics.jsonl", MAX_LINE)
        self._start: StartLine | None = None
        self._event: EventLine | None = None
        self._sampled: RlLine | None = None
        self._steps: deque[bytes] = deque(maxlen=_WINDOW)
        self._num_lines = 0

    def read(self) -> RunStatus:
        """Return the state as it is now."""
        files = tuple(_stamp(self.folder / name) for name in _FILES)
        changed = max(stamp for _, stamp in files) / 1e9
        job = read_job(self.folder)
        try:
            for name in _FILES:
                if (self.folder / name).is_symlink():
                    raise DataError("is a link, which is not followed", place=name)
            if files[0][0] >= 0:
                self._read_lines()
        except DataError as error:
            return RunStatus(BROKEN, str(error), changed=changed, files=files)
        steps = [line for line in map(_parsed, self._steps) if isinstance(line, StepLine)]
        state, why = self._state(job, steps)
        total = self._start.total_steps if self._start else None
        step = steps[-1].step if steps else self._start.step if self._start else None
        rate, seconds = _mean(steps, "tokens_per_s"), _mean(steps, "seconds")
        left = None
        if state == RUNNING and None not in (total, step, seconds):
            left = max(0, (total or 0) - (step or 0)) * (seconds or 0.0)
        return RunStatus(state, why, step, total, self._figure(steps), rate, left, changed, files)

    def _read_lines(self) -> None:
        if self._lines.was_replaced():
            lines = self._lines
            self._forget()
            self._lines = lines
        for _, line in self._lines.new_lines():
            self._num_lines += 1
            if line.startswith(_STEP):
                self._steps.append(line)
            elif line.startswith(_TOLD):
                self._take(line)

    def _take(self, text: bytes) -> None:
        line = _parsed(text)
        if isinstance(line, StartLine):
            self._start, self._event, self._sampled = line, None, None
            self._steps.clear()
        elif isinstance(line, EventLine):
            self._event = line
        elif isinstance(line, RlLine):
            self._sampled = line

    def _figure(self, steps: Sequence[StepLine]) -> tuple[str, float] | None:
        """Return the last loss. A run that learns from samples has a reward, or the divergence from
        its teacher, because its loss is about 0 from the first step on."""
        found: list[tuple[str, float | None]] = [("loss", step.loss) for step in steps]
        if (line := self._sampled) is not None:
            found = [("KL to the teacher", line.teacher_kl), ("reward", line.reward)]
        known = [(name, value) for name, value in found if value is not None]
        return next((each for each in reversed(known) if math.isfinite(each[1])), None)

    def _state(self, job: Job | None, steps: Sequence[StepLine]) -> tuple[str, str]:
        if job is not None and job.is_running:
            return (RUNNING, "") if self._start else (BEING_WRITTEN, "It has not begun to train.")
        if job is not None and job.failure is not None:
            return FAILED_RUN, job.failure
        if self._start is None:
            if self._num_lines:
                return BROKEN, "metrics.jsonl has no line of a start: it is not the log of a run."
            if job is None:
                return BEING_WRITTEN, "It has no lines yet."
            return KILLED, "It ended before its first step."
        event = self._event.text if self._event else ""
        if event.startswith(STOPPED):
            return STOPPED_RUN, event
        if job is not None and job.has_ended:
            return FINISHED, ""
        done = steps[-1].step if steps else self._start.step
        return KILLED, f"Its process was killed, or its machine failed, after step {done:,}."


def _parsed(text: bytes) -> object:
    """Return a line of the log, or None for one that is damaged."""
    with suppress(DataError):
        return from_json(text.decode(errors="replace"))
    return None


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size of a file and the time of its last change; -1 and 0 where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _mean(steps: Sequence[StepLine], name: str) -> float | None:
    values = [value for s in steps if math.isfinite(value := getattr(s, name))]
    return sum(values) / len(values) if values else None


_MAX_OPEN = 8  # runs whose lines stay in memory
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class WatchedRun:
    """A run as it is now."""

    name: str
    folder: Path
    status: RunStatus


class WatchedRuns:
    """The runs under some folders, by name. Several threads may ask at the same time."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self._lock = threading.Lock()
        self._readers: dict[str, StatusReader] = {}
        self._open: dict[Path, OpenRun] = {}

    def all(self) -> list[WatchedRun]:
        """Return all runs."""
        with self._lock:
            self._find()
            return [_as_it_is(name, reader) for name, reader in self._readers.items()]

    def get(self, name: str) -> WatchedRun | None:
        """Return the run with a name. Only runs that were found have one."""
        with self._lock:
            if name not in self._readers or not self._readers[name].folder.is_dir():
                self._find()
            reader = self._readers.get(name)
            return None if reader is None else _as_it_is(name, reader)

    def page(self, run: WatchedRun) -> list[Markup]:
        """Return the elements of a run's page."""
        with self._lock:
            opened = self._open.pop(run.folder, None) or OpenRun(run.folder, run.name)
            self._open[run.folder] = opened  # the last one
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        return opened.page(run.status)

    def _find(self) -> None:
        known = {reader.folder: reader for reader in self._readers.values()}
        found = find_runs(self.folders)
        self._readers = {
            name: known.get(folder) or StatusReader(folder) for name, folder in found.items()
        }


def _as_it_is(name: str, reader: StatusReader) -> WatchedRun:
    try:
        status = reader.read()
    except Exception as error:  # no run hides the others
        status = RunStatus(BROKEN, f"Its state cannot be read: {reason(error)}.")
    return WatchedRun(name, reader.folder, status)


class OpenRun:
    """The lines of a run so far. Each is read once. The page is drawn when a file has changed."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self._lock = threading.Lock()
        self._lines = GrowingLines(folder / "metrics.jsonl", MAX_LINE)
        self._reading = MetricsReading()
        self._samples = SampleIndex(folder / SAMPLES)
        self._drawn: tuple[RunStatus, list[Markup]] | None = None

    def page(self, status: RunStatus) -> list[Markup]:
        """Return the elements of the page, with what has gone wrong in place of what cannot be
        drawn."""
        with self._lock:
            if self._drawn is None or self._drawn[0] != status:
                try:
                    elements = [*page_body(self.report(status))]
                except Exception as error:  # the page tells it, and the server goes on
                    said = str(error) if isinstance(error, DataError) else reason(error)
                    note = f"This page cannot be drawn: {said}"
                    elements = [*page_body(self._note(note, is_alarm=True))]
                self._drawn = status, elements
            return self._drawn[1]

    def report(self, status: RunStatus) -> Report:
        """Return the report of the lines so far."""
        if status.state != BROKEN:
            self._read_on()
        if status.state == BROKEN or (not self._reading.rows and status.step is None):
            return self._note(status.why or "It has no lines yet.", not status.is_active)
        run = LoggedRun(self.name, self._reading.metrics(), self._config())
        return run_report(run, self.folder, self._samples)

    def _read_on(self) -> None:
        if not os.path.lexists(self._lines.path):
            return
        if self._lines.was_replaced():
            self._reading = MetricsReading()
        for _, line in self._lines.new_lines():
            self._reading.take(line.decode(errors="replace"))

    def _note(self, text: str, is_alarm: bool) -> Report:
        note = Note(text, "alarm" if is_alarm else "quiet")
        return Report(f"{self.name}: training report", self.name, [], [note], [])

    def _config(self) -> str:
        path = self.folder / "config.yaml"
        if not os.path.lexists(path) or path.is_symlink():
            return ""
        try:
            return UntrustedFile(str(path)).content(_MAX_CONFIG_BYTES).decode(errors="replace")
        except DataError as error:
            return f"# {error}"
