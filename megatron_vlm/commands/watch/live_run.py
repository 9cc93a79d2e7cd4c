"""Lines of one run in memory: each is read once, for the page and for what is new on it."""

import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.report.run.curves import new_points
from megatron_vlm.report.run.growing_lines import GrowingLines
from megatron_vlm.report.run.metrics_arrays import MAX_LINE, LoggedRun, MetricsReading
from megatron_vlm.report.run.page import run_report
from megatron_vlm.report.run.rl_sample_lines import SampleIndex
from megatron_vlm.report.sections import Report

_MAX_CONFIG_BYTES = 2**20
_POINTS = (b'{"kind": "step"', b'{"kind": "rl"')  # lines that are points of charts
_MAX_POINTS = 2000  # steps whose points are sent one by one


@dataclass(frozen=True)
class ReadPosition:
    """The place in the lines of a run up to which a page has them. `version` changes where a page
    must be drawn again: the file was replaced, or the run has resumed."""

    version: str
    rows: int
    sampled: int  # step of the last line of samples
    others: int  # lines that are no points: a page shows them when it is drawn again

    def __str__(self) -> str:
        return f"{self.version}.{self.rows}.{self.sampled}.{self.others}"

    @staticmethod
    def parse(text: str) -> "ReadPosition | None":
        """Return the place that a page sends back; None for any other text."""
        version, *numbers = text[:100].split(".")
        try:
            rows, sampled, others = map(int, numbers)
        except ValueError:
            return None
        return ReadPosition(version, rows, sampled, others)


class LiveRun:
    """The lines of a run so far. Several threads may ask at the same time."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.lock = threading.Lock()
        self._others = 0
        self._reads = 0
        self._key = secrets.token_hex(4)
        self._lines = GrowingLines(folder / "metrics.jsonl", MAX_LINE)
        self._reading = MetricsReading()
        self._samples = SampleIndex(folder / SAMPLES)

    @property
    def place(self) -> ReadPosition:
        samples = self._reading.samples
        version = f"{self._key}-{self._reads}-{len(self._reading.resumes)}"
        return ReadPosition(version, self._reading.num_rows, max(samples, default=-1), self._others)

    def read_on(self) -> None:
        """Read the lines that are new. The caller has the lock."""
        if not os.path.lexists(self._lines.path):
            return
        if self._lines.has_begun_anew():
            self._reading = MetricsReading()
            self._reads += 1
        for _, line in self._lines.new_lines():
            self._reading.take(line.decode(errors="replace"))
            self._others += not line.startswith(_POINTS)

    def points_after(self, place: ReadPosition) -> dict[str, Any] | None:
        """Return the points that a page lacks; None if it must be drawn again. The caller has the
        lock."""
        now = self.place
        missing = now.rows - place.rows
        if place.version != now.version or not 0 <= missing <= _MAX_POINTS:
            return None
        # Samples without a step are of the step in progress: its other figures will come.
        metrics = self._reading.metrics(place.rows, place.sampled)
        return new_points(LoggedRun(self.name, metrics, ""))

    def report(self) -> Report:
        """Return the report of the lines so far. The caller has the lock."""
        run = LoggedRun(self.name, self._reading.metrics(), self._config())
        if os.path.lexists(self._samples.path):
            self._samples.read_on()
        return run_report(run, self.folder, self._samples)

    def _config(self) -> str:
        path = self.folder / "config.yaml"
        if not os.path.lexists(path) or path.is_symlink():
            return ""
        try:
            return UntrustedFile(str(path)).content(_MAX_CONFIG_BYTES).decode(errors="replace")
        except DataError as error:
            return f"# {error}"
