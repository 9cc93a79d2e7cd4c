"""Log of a run. It always has metrics.jsonl, and lines or a progress line on the terminal. Trackers
are optional. Only rank 0 writes."""

import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError, TrainError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report import metrics_lines
from megatron_vlm.run.trackers import (
    TRACKER_PATIENCE_S,
    TrackedRun,
    TrackedSample,
    Tracker,
    TrackerThread,
)


class UnbufferedFile:
    """A growing file without a buffer. Data that cannot be written now is not kept for later."""

    def __init__(self, path: Path):
        self.path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab", buffering=0)

    def write(self, text: bytes) -> None:
        with self._writing():
            while text:
                text = text[self.file.write(text) :]

    def close(self) -> None:
        self.file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainError(
                f"cannot be written: {error.strerror}",
                place=str(self.path),
                remedy="free space there, or give another run=FOLDER; started again, the run "
                "resumes from its last checkpoint",
            ) from error


class JsonLines:
    """The file metrics.jsonl or samples.jsonl. Each line is one, even after a killed run's."""

    def __init__(self, path: Path):
        before = path.read_bytes() if path.is_file() else b""
        self.file = UnbufferedFile(path)
        if before and not before.endswith(b"\n"):  # the last line of a killed run
            self.file.write(b"\n")

    def write(self, line: metrics_lines.Line) -> None:
        self.add(metrics_lines.to_json(line))

    def add(self, text: str) -> None:
        """Write a line that is already formatted."""
        self.file.write(text.encode() + b"\n")

    def close(self) -> None:
        self.file.close()


def _numbers(line: metrics_lines.Line) -> dict[str, float]:
    """Return the scalars of a line, named as the charts are: train/loss, eval/exact_match,
    rl/reward. A figure of a reward is rl/NAME, or rl/figures/NAME if RlLine has a field of that
    name."""
    if isinstance(line, metrics_lines.RlLine):
        figures = {f"{'figures/' * (k in vars(line))}{k}": v for k, v in line.figures.items()}
        return _scalars("rl", line) | {f"rl/{name}": value for name, value in figures.items()}
    if isinstance(line, metrics_lines.StepLine | metrics_lines.EvalLine):
        prefix = "train" if isinstance(line, metrics_lines.StepLine) else line.name
        metrics = (line.metrics or {}) if isinstance(line, metrics_lines.EvalLine) else {}
        return _scalars(prefix, line) | {f"{prefix}/{k}": v for k, v in metrics.items()}
    return {}


def _scalars(prefix: str, line: metrics_lines.Line) -> dict[str, float]:
    return {
        f"{prefix}/{key}": float(value)
        for key, value in vars(line).items()
        if isinstance(value, int | float) and key not in ("step", "wall_s")
    }


_BAR_WIDTH = 10
_BAR_AFTER = 4  # figures that are more important than the bar
_GAP = 2


@dataclass
class RunLog:
    """The log of a run. Every rank opens one, but only rank 0 writes to it."""

    cfg: Config
    speaks: bool
    total_steps: int
    first_step: int = 0
    patience_s: float = TRACKER_PATIENCE_S  # maximum duration of a tracker's call
    console: Console = field(default_factory=lambda: Console(stderr=False, highlight=False))

    def __post_init__(self) -> None:
        self.lines: JsonLines | None = None
        self.trackers: list[TrackerThread] = []
        self.live: Live | None = None  # the last line of the terminal, with the newest figures
        self.shown: tuple[int, str, Sequence[str]] = (self.first_step, "-:--:--", ())
        self.window: list[metrics_lines.StepLine] = []
        self.learnt: list[str] = []  # from the samples of the last step
        self.began = time.monotonic()
        if not self.speaks:
            return
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            draw = self._draw_progress
            self.live = Live(console=self.console, get_renderable=draw, refresh_per_second=4)
            self.live.start()

    def start(self, **facts: Any) -> None:
        """Log a start or resume, with the fields of StartLine except the time."""
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self.began = time.monotonic()
        self._write(metrics_lines.StartLine(time=now, **facts))

    def step(self, figures: metrics_lines.StepLine) -> None:
        """Log a step to the files, and to the terminal at intervals or in the line of progress."""
        self._write(replace(figures, wall_s=self._wall_s()))
        if not self.speaks:
            return
        self.window.append(figures)
        done = figures.step
        left = duration((self.total_steps - done) * _mean(self.window, "seconds"))
        # The loss of samples is about 0 from the first step on: their reward takes its place.
        parts = [*self.learnt, *step_figures(self.window)[bool(self.learnt) :]]
        if self.live is not None:
            self.shown = done, left, parts
            self.window = self.window[-20:]
        elif done % self.cfg.log.every == 0 or done == self.total_steps:
            line = "  ".join([f"step {done}/{self.total_steps}", *parts, f"{left} left"])
            self.console.print(line, soft_wrap=True)
            self.window = []

    def usage(self, step: int, memory_gb: list[float], seconds: dict[str, float]) -> None:
        """Write the fields of UsageLine to the files only."""
        self._write(metrics_lines.UsageLine(step, memory_gb, seconds))

    def samples(self, figures: metrics_lines.RlLine) -> None:
        """Log the samples of a step before its other figures: the terminal shows one line."""
        self._write(figures)
        parts = [f"{figures.answer_tokens:.1f} tokens", f"{figures.sampling_s:.1f} s of sampling"]
        for name in ("apart", "accepted", "seen", "kl", "teacher_kl", "reward"):
            if (value := getattr(figures, name)) is not None:
                parts.insert(0, f"{name} {value:.{4 if name == 'reward' else 2}g}")
        self.learnt = parts

    def evaluation(self, step: int, name: str, scores: dict[str, Any]) -> None:
        """Log the scores of one evaluation set."""
        self._write(metrics_lines.EvalLine.from_scores(step, name, scores, self._wall_s()))
        text = "  ".join(f"{key} {value:.4g}" for key, value in scores.items())
        self.say(f"{name} after {step} steps: {text}")

    def show(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        """Send samples to the trackers only: of the evaluation set of this name, or of rl."""
        if samples:
            self._send(step, lambda tracker: tracker.log_samples(step, name, samples))

    def event(self, step: int, text: str) -> None:
        """Log an event to the files and the terminal, so that a person can still read it later."""
        self._write(metrics_lines.EventLine(step, text))
        self.say(text)

    def say(self, text: str | Table) -> None:
        """Print to the terminal only."""
        if self.speaks:
            shown = escape_controls(text) if isinstance(text, str) else text
            self.console.print(shown, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()  # it leaves the line as it is
        self._send(self.first_step, lambda tracker: tracker.finish())
        for tracker in self.trackers:
            tracker.wait()
        self._part_from_lost(self.first_step)
        if self.lines is not None:
            self.lines.close()

    def _draw_progress(self) -> Table:
        done, left, figures = self.shown
        return progress_line(self.console.width, done, self.total_steps, left, figures)

    def _wall_s(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def _write(self, line: metrics_lines.Line) -> None:
        if not self.speaks:
            return
        if self.lines is None:  # with the first line, since a start may be refused
            self.lines = JsonLines(Path(self.cfg.run) / "metrics.jsonl")
            self._start_trackers()
        self.lines.write(line)
        if numbers := _numbers(line):
            self._send(line.step, lambda tracker: tracker.log_figures(line.step, numbers))

    def _start_trackers(self) -> None:
        run = TrackedRun.from_config(self.cfg, self.first_step)
        self.trackers = [
            TrackerThread(name, run, self.patience_s) for name in self.cfg.log.trackers
        ]
        for tracker in self.trackers:
            tracker.wait()
            if tracker.problem is not None and not self.first_step:  # nothing is lost yet
                raise ConfigError(
                    f"cannot be started: {tracker.problem}",
                    key="log.trackers",
                    found=tracker.name,
                    remedy=f"correct that, or leave {tracker.name} out",
                )
        self._part_from_lost(self.first_step)

    def _send(self, step: int, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            tracker.send(call)
        self._part_from_lost(step)

    def _part_from_lost(self, step: int) -> None:
        """Warn once of each tracker that has failed, and go on without it."""
        lost = [tracker for tracker in self.trackers if tracker.problem is not None]
        self.trackers = [tracker for tracker in self.trackers if tracker.problem is None]
        for tracker in lost:
            self.event(
                step,
                f"log.trackers={tracker.name} gets nothing more until the run is started again, "
                f"and metrics.jsonl has all figures: {tracker.problem}",
            )


def step_figures(window: list[metrics_lines.StepLine]) -> list[str]:
    """Format the figures of the last steps for a line, the most important ones first."""
    last = window[-1]
    losses = [figures.loss for figures in window if math.isfinite(figures.loss)] or [math.nan]
    parts = [
        f"loss {sum(losses) / len(losses):.4f}",
        f"lr {last.lr:.2e}",
        f"norm {last.grad_norm:.3g}",
        *_pair_figures(window),
        f"{_mean(window, 'tokens_per_s'):,.0f} tok/s",
        f"({_mean(window, 'trained_tokens_per_s'):,.0f} trained)",
        f"{_mean(window, 'images_per_s'):,.1f} img/s",
        f"pad {100 * _mean(window, 'padding'):.1f}%",
    ]
    if last.shared_patches is not None:
        parts.append(f"shared {100 * last.shared_patches:.0f}%")
    if last.mfu is not None:
        parts.append(f"MFU {100 * _mean(window, 'mfu'):.1f}%")
    return [*parts, f"{last.memory_gb:.1f} GB"]


def _pair_figures(window: list[metrics_lines.StepLine]) -> list[str]:
    """Format the figures of objectives over pairs; nothing for others."""
    if window[-1].reward_accuracy is None:
        return []
    accuracy, margin = _mean(window, "reward_accuracy"), _mean(window, "rewards_margin")
    return [f"accuracy {100 * accuracy:.0f}%", f"margin {margin:.3g}"]


def duration(seconds: float) -> str:
    """Format seconds: 4000 as 1:06:40."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _mean(window: list[metrics_lines.StepLine], name: str) -> float:
    values: list[float] = [getattr(figures, name) for figures in window]
    return sum(values) / len(values)


def progress_line(width: int, done: int, total: int, left: str, figures: Sequence[str]) -> Table:
    """Return the bar, the number of the step, the time left and as many figures as fit into this
    number of columns. Step and time always come first; the bar is whole or absent."""
    parts = [f"step {done}/{total}", f"{left} left"]
    used, bar = len(f"{parts[0]}{parts[1]}") + _GAP, 0
    for place, figure in enumerate(figures):
        if place == _BAR_AFTER and used + _GAP + _BAR_WIDTH <= width:
            bar, used = _BAR_WIDTH, used + _GAP + _BAR_WIDTH
        if used + _GAP + len(figure) > width:
            break
        parts.append(figure)
        used += _GAP + len(figure)
    text = Text((" " * _GAP).join(parts), no_wrap=True, overflow="crop")
    line = Table.grid(padding=(0, _GAP, 0, 0))
    line.add_row(*([ProgressBar(total, done, width=bar)] if bar else []), text)
    return line
