"""Runs below the watched folders, and the page of each. A request reads what is new since the last
one: nothing happens between two requests."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from megatron_vlm.commands.watch.run_status import BROKEN, RunStatus, StatusReader, find_runs
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile, reason
from megatron_vlm.report.html import page_body
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.report.run.metrics_arrays import MAX_LINE, LoggedRun, MetricsReading
from megatron_vlm.report.run.page import run_report
from megatron_vlm.report.run.rl_samples import GrowingLines, SampleIndex
from megatron_vlm.report.sections import Note, Report

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
        """Return the run with a name. Only runs that were found have one, so no name leads anywhere
        else."""
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
        if self._lines.has_begun_anew():
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
