"""metrics.jsonl of a run folder, as arrays.

A step that a resumed run repeated replaces the first one. Lines after the checkpoint from which the
run resumed are dropped, because they were measured on weights that are gone.

Shapes: N steps.
"""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.report.charts import smooth, smoothing_window
from megatron_vlm.report.metrics_lines import (
    STEP_FIELDS,
    EvalLine,
    EventLine,
    Line,
    RlLine,
    StartLine,
    UsageLine,
    line_or_row,
)

MAX_LINE = 2**20  # characters of a line that are read at once
CUT_OFF = "cannot be read: a run that is killed cuts off its last one."
_WALL = STEP_FIELDS.index("wall_s")
_MEAN_OF = 10  # steps; the reward of a single step is too noisy
# The scores of an evaluation, and which of their values is the best.
SCORES = {"reward": max, "loss": min, "token_accuracy": max, "exact_match": max, "ranking": max}
SCORES |= {"reward_accuracy": max, "rewards_margin": max, "divergence": min, "cross_entropy": min}
SCORES |= {"anls": max, "relaxed_accuracy": max, "iou": max, "iou_accuracy": max}


@dataclass(frozen=True)
class RunMetrics:
    """The log of a run in the order of steps. A figure that was null is nan."""

    history: tuple[StartLine | EventLine, ...]  # in the order of the file
    steps_N: np.ndarray
    epochs_N: np.ndarray
    skipped_N: np.ndarray  # their loss or gradient was not finite
    empty_N: np.ndarray  # no token of their batch was trained
    figures: dict[str, np.ndarray]  # by the fields of StepLine, each [N]
    evaluations: tuple[EvalLine, ...]
    samples: tuple[RlLine, ...]  # one for each step of `megatron-vlm rl`
    seconds: float  # time of all steps, with those that were repeated
    wall_s: float  # from each start to its last line
    replaced: int  # steps that were repeated or lost
    unreadable: int  # lines that are malformed, such as the last one of a killed run
    usages: tuple[UsageLine, ...] = ()  # in the order of the file

    @property
    def steps_done(self) -> int:
        return int(self.steps_N[-1]) if len(self.steps_N) else 0

    @property
    def starts(self) -> list[StartLine]:
        return [line for line in self.history if isinstance(line, StartLine)]

    @property
    def last_start(self) -> StartLine | None:
        return self.starts[-1] if self.starts else None

    @property
    def tokens_per_s(self) -> float:
        """The median; nan if no step has a finite value."""
        rate_N = self.figures["tokens_per_s"]
        rate_N = rate_N[np.isfinite(rate_N)]
        return float(np.median(rate_N)) if len(rate_N) else math.nan

    def losses(self) -> dict[str, tuple[float, int]]:
        """Return the last training loss and the lowest of the smoothed curve, each with its step:
        the loss of a single step depends on its samples more than on the model."""
        loss_N = self.figures["loss"]
        finite = np.flatnonzero(np.isfinite(loss_N))
        if not len(finite):
            return {}
        steps, means = smooth(self.steps_N, loss_N)
        last, best = finite[-1], int(np.argmin(means))
        return {
            "last": (float(loss_N[last]), int(self.steps_N[last])),
            "best": (float(means[best]), int(steps[best])),
        }

    @property
    def mean_of(self) -> int:
        """The number of steps in a point of the smoothed loss; 1 if it is not smoothed."""
        return smoothing_window(int(np.isfinite(self.figures["loss"]).sum()))

    @property
    def samples_seen(self) -> int | None:
        """The rows of all steps; None if a line does not have them."""
        rows_N = self.figures["samples"]
        return int(rows_N.sum()) if len(rows_N) and np.isfinite(rows_N).all() else None

    def rewards(self) -> dict[str, tuple[float, int, int]]:
        """Return the last and the best mean reward of ten steps, or of all if there are fewer. Each
        comes with its first and its last step."""
        rewards = [(line.step, line.reward) for line in self.samples]
        known = [(step, r) for step, r in rewards if r is not None and math.isfinite(r)]
        if not known:
            return {}
        width = min(_MEAN_OF, len(known))
        means = np.convolve([reward for _, reward in known], np.full(width, 1 / width), "valid")
        rows = {"last": len(means) - 1, "best": int(means.argmax())}
        ends = {name: (known[row][0], known[row + width - 1][0]) for name, row in rows.items()}
        return {name: (float(means[row]), *ends[name]) for name, row in rows.items()}

    def sets(self) -> dict[str, list[EvalLine]]:
        """Return the evaluations of each set."""
        names = dict.fromkeys(each.name for each in self.evaluations)
        return {name: [e for e in self.evaluations if e.name == name] for name in names}


@dataclass(frozen=True)
class LoggedRun:
    """A run as a page shows it."""

    name: str
    metrics: RunMetrics
    config: str  # config.yaml


def best_of(evaluations: list[EvalLine], score: str) -> EvalLine | None:
    """Return the first evaluation with the best value of this score."""
    measured = [e for e in evaluations if math.isfinite(e.score(score))]
    return SCORES.get(score, max)(measured, key=lambda e: e.score(score)) if measured else None


def read_metrics(path: Path) -> RunMetrics:
    """Read all lines of the file. Lines of an unknown kind are skipped."""
    reading = MetricsReading()
    file = UntrustedFile(str(path), remedy="give the folder of a run")
    file.regular_path()
    with file.wrap_errors("cannot be read"), path.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(MAX_LINE):
            reading.take(line)
    return reading.metrics()


class MetricsReading:
    """The lines read so far. Rows of numbers, maybe hundreds of thousands, are in a flat array."""

    def __init__(self) -> None:
        self.rows = array("d")
        self.resumes: list[tuple[int, int]] = []  # (rows before a resume, steps done before it)
        self.evaluations: dict[tuple[str, int], EvalLine] = {}
        self.samples: dict[int, RlLine] = {}
        self.usages: list[UsageLine] = []
        self.history: list[StartLine | EventLine] = []
        self.walls: list[float] = [0.0]  # seconds of each start up to its last line
        self.unreadable = 0

    def take(self, text: str) -> None:
        if text.strip():
            try:
                self._take_line(line_or_row(text))
            except DataError:
                self.unreadable += 1

    def _take_line(self, line: Line | list[float] | None) -> None:
        if isinstance(line, list):
            self.rows.extend(line)
            self._see_time(line[_WALL])
        elif isinstance(line, EvalLine):
            self.evaluations[line.name, line.step] = line
            self._see_time(line.wall_s)
        elif isinstance(line, UsageLine):
            self.usages.append(line)
        elif isinstance(line, RlLine):
            self.samples[line.step] = line
        elif isinstance(line, StartLine | EventLine):
            self.history.append(line)
            if isinstance(line, StartLine):
                self._resume(line.step)
                self.walls.append(0.0)

    def _see_time(self, wall_s: float | None) -> None:
        if wall_s is not None and math.isfinite(wall_s):
            self.walls[-1] = max(self.walls[-1], wall_s)

    def _resume(self, step: int) -> None:
        self.resumes.append((len(self.rows) // len(STEP_FIELDS), step))
        self.evaluations = {k: e for k, e in self.evaluations.items() if e.step <= step}
        self.samples = {number: each for number, each in self.samples.items() if number <= step}

    def metrics(self) -> RunMetrics:
        """Return the log of the run."""
        rows = np.array(self.rows).reshape(-1, len(STEP_FIELDS))
        live_rows = rows[self._current_rows(rows[:, 0].astype(np.int64))]
        columns = dict(zip(STEP_FIELDS, live_rows.T, strict=True))
        return RunMetrics(
            history=tuple(self.history),
            steps_N=columns.pop("step").astype(np.int64),
            epochs_N=columns.pop("epoch").astype(np.int64),
            skipped_N=columns.pop("skipped").astype(bool),
            empty_N=columns.pop("empty").astype(bool),
            figures=columns,
            evaluations=tuple(sorted(self.evaluations.values(), key=lambda e: (e.step, e.name))),
            samples=tuple(line for _, line in sorted(self.samples.items())),
            seconds=float(np.nansum(rows[:, STEP_FIELDS.index("seconds")])),
            wall_s=sum(self.walls),
            replaced=len(rows) - len(live_rows),
            unreadable=self.unreadable,
            usages=tuple(self.usages),
        )

    def _current_rows(self, steps: np.ndarray) -> np.ndarray:
        """Return the rows of the run as it is now: the last of each step that no resume dropped."""
        alive = np.ones(len(steps), dtype=bool)
        for rows_before, steps_done in self.resumes:
            alive[:rows_before] &= steps[:rows_before] <= steps_done
        last_first = np.flatnonzero(alive)[::-1]
        _, places = np.unique(steps[last_first], return_index=True)
        return last_first[places]
