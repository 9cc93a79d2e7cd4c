"""A tracker of another package: it appends its calls to RUN/calls.jsonl. It fails in the call that
RUN/fault names: it raises there, or it never returns."""

import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_vlm.run.trackers import TRACKER_GROUP, TrackedRun
from tests.support import entry_point


class FileTracker:
    def __init__(self, run: TrackedRun) -> None:
        self.folder = run.folder
        start = {"id": run.id, "name": run.name, "project": run.project, "step": run.first_step}
        self._add("start", start | {"lr": run.config["optim.lr"]})

    def log_figures(self, step, figures):
        self._add("figures", {"step": step, **figures})

    def log_samples(self, step, name, samples):
        shown = [
            {"text": each.text, "pixels": [p.getpixel((0, 0)) for p in each.pictures()]}
            for each in samples
        ]
        self._add("samples", {"step": step, "name": name, "samples": shown})

    def finish(self):
        self._add("finish", {})

    def _add(self, call, content):
        path = self.folder / "fault"
        fault = path.read_text().split() if path.exists() else []
        if fault and fault[1] == call:
            if fault[0] == "hangs":
                threading.Event().wait()
            raise SystemExit(f"{call} failed\nhere")
        with open(self.folder / "calls.jsonl", "a") as file:
            file.write(json.dumps({"call": call, **content}) + "\n")


def registered(folder: Path) -> AbstractContextManager[None]:
    """Register the tracker as `file`, by a package in this folder."""
    return entry_point.registered(folder, TRACKER_GROUP, "file", f"{__name__}:FileTracker")
