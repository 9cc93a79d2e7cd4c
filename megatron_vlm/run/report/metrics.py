"""metrics.jsonl of a run folder, as arrays.

Steps count from 0, as the loop does; evaluations and starts name how many steps were done. What a
resumed run did again replaces what stood there, and what lay behind its checkpoint is gone with
the weights it was measured on.

Shapes: N steps.
"""

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.errors import DataError

_FIGURES = (
    *("loss", "lr", "grad_norm", "seconds", "tokens_per_s", "trained_tokens_per_s"),
    *("images_per_s", "padding", "mfu", "memory_gb"),
)
_ROW = ("step", "epoch", "skipped", *_FIGURES)
_NAN = math.nan
# What an evaluation measures, and which end of it is the best.
SCORES = {"loss": min, "token_accuracy": max, "exact_match": max, "ranking": max}


@dataclass(frozen=True)
class Evaluation:
    """One set, measured after `step` steps. A score that is absent or no number is nan."""

    step: int
    name: str
    scores: dict[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True)
class RunMetrics:
    """What a run logged, in the order of steps. A figure that was null is nan."""

    history: tuple[dict[str, Any], ...]  # lines of starts and events, as they came
    steps_N: np.ndarray
    epochs_N: np.ndarray
    skipped_N: np.ndarray
    figures: dict[str, np.ndarray]  # by the keys of a step's line, each [N]
    evaluations: tuple[Evaluation, ...]
    seconds: float  # of all steps, those done again included
    replaced: int  # steps that were done again or lost
    unreadable: int  # lines, such as the last of a killed run

    @property
    def steps_done(self) -> int:
        return int(self.steps_N[-1]) + 1 if len(self.steps_N) else 0

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.history if line["kind"] == "start"]

    @property
    def last_start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    def sets(self) -> dict[str, list[Evaluation]]:
        """The evaluations of each named set."""
        found: dict[str, list[Evaluation]] = {}
        for evaluation in self.evaluations:
            found.setdefault(evaluation.name, []).append(evaluation)
        return found


def best_of(evaluations: list[Evaluation], score: str) -> Evaluation | None:
    """The first evaluation with the best of this score."""
    measured = [e for e in evaluations if math.isfinite(e.scores[score])]
    return SCORES[score](measured, key=lambda e: e.scores[score]) if measured else None


def read_metrics(path: Path) -> RunMetrics:
    """All lines of the file. Lines of a kind that is not known are passed over."""
    reading = _Reading()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                reading.take(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the folder of a run") from error
    return reading.metrics()


class _Reading:
    """Lines so far. Rows of numbers in one flat array: there may be hundreds of thousands."""

    def __init__(self) -> None:
        self.rows = array("d")
        self.resumes: list[tuple[int, int]] = []  # after so many rows, so many steps were done
        self.evaluations: dict[tuple[str, int], Evaluation] = {}
        self.history: list[dict[str, Any]] = []
        self.unreadable = 0

    def take(self, line: str) -> None:
        if not line.strip():
            return
        try:
            self._take(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            self.unreadable += 1

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "step":
            place = (int(line["step"]), int(line.get("epoch", 0)), bool(line.get("skipped")))
            figures = [_NAN if (value := line.get(key)) is None else value for key in _FIGURES]
            # Made whole before it is appended: half a row would shift all that follow.
            self.rows.extend(array("d", (*place, *figures)))
        elif kind == "eval":
            evaluation = _evaluation(line)
            self.evaluations[evaluation.name, evaluation.step] = evaluation
        elif kind == "event":
            self.history.append({**line, "step": int(line["step"]), "text": str(line["text"])})
        elif kind == "start":
            step = int(line["step"])
            self.history.append({**line, "step": step})
            self.resumes.append((len(self.rows) // len(_ROW), step))
            self.evaluations = {k: e for k, e in self.evaluations.items() if e.step <= step}

    def metrics(self) -> RunMetrics:
        rows = np.array(self.rows).reshape(-1, len(_ROW))
        rows[~np.isfinite(rows)] = _NAN
        kept = rows[list(self._kept(rows[:, 0].astype(np.int64)))]
        columns = dict(zip(_ROW, kept.T, strict=True))
        return RunMetrics(
            history=tuple(self.history),
            steps_N=columns["step"].astype(np.int64),
            epochs_N=columns["epoch"].astype(np.int64),
            skipped_N=columns["skipped"].astype(bool),
            figures={key: columns[key] for key in _FIGURES},
            evaluations=tuple(sorted(self.evaluations.values(), key=lambda e: (e.step, e.name))),
            seconds=float(np.nansum(rows[:, _ROW.index("seconds")])),
            replaced=len(rows) - len(kept),
            unreadable=self.unreadable,
        )

    def _kept(self, steps: np.ndarray) -> Iterator[int]:
        """Rows of the run as it stands: the last of each step, none that a resume left behind."""
        alive = np.ones(len(steps), dtype=bool)
        for rows_before, steps_done in self.resumes:
            alive[:rows_before] &= steps[:rows_before] < steps_done
        last = {int(steps[row]): int(row) for row in np.flatnonzero(alive)}
        return (last[step] for step in sorted(last))


def _number(line: dict[str, Any], key: str) -> float:
    """A figure; nan where it is null or absent."""
    value = line.get(key)
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _evaluation(line: dict[str, Any]) -> Evaluation:
    scores = {key: _number(line, key) for key in SCORES}
    seconds = _number(line, "seconds")
    return Evaluation(int(line["step"]), str(line["name"]), scores, int(line["samples"]), seconds)
