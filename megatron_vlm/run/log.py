"""Log of a run. It always has metrics.jsonl, and lines or a progress line on the terminal.
TensorBoard and W&B are optional. Only rank 0 writes."""

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_vlm.config.schema import Config
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.metrics_lines import (
    EvalLine,
    EventLine,
    Line,
    RlLine,
    StartLine,
    StepLine,
    UsageLine,
)
from megatron_vlm.run.log_sinks import JsonLines, TensorBoard, WandB

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
    console: Console = field(default_factory=lambda: Console(stderr=False, highlight=False))

    def __post_init__(self) -> None:
        self.sinks: list[Any] = []
        self.live: Live | None = None  # the last line of the terminal, with the newest figures
        self.shown: tuple[int, str, Sequence[str]] = (self.first_step, "-:--:--", ())
        self.window: list[StepLine] = []
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
        self._write(StartLine(time=now, **facts))

    def step(self, figures: StepLine) -> None:
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
        self._write(UsageLine(step, memory_gb, seconds))

    def samples(self, figures: RlLine) -> None:
        """Log the samples of a step before its other figures: the terminal shows one line."""
        self._write(figures)
        parts = [f"{figures.answer_tokens:.1f} tokens", f"{figures.sampling_s:.1f} s of sampling"]
        for name in ("apart", "seen", "kl", "teacher_kl", "reward"):
            if (value := getattr(figures, name)) is not None:
                parts.insert(0, f"{name} {value:.{4 if name == 'reward' else 2}g}")
        self.learnt = parts

    def evaluation(self, step: int, name: str, scores: dict[str, Any]) -> None:
        """Log the scores of one evaluation set."""
        self._write(EvalLine.from_scores(step, name, scores, self._wall_s()))
        text = "  ".join(f"{key} {value:.4g}" for key, value in scores.items())
        self.say(f"{name} after {step} steps: {text}")

    def event(self, step: int, text: str) -> None:
        """Log an event to the files and the terminal, so that a person can still read it later."""
        self._write(EventLine(step, text))
        self.say(text)

    def say(self, text: str | Table) -> None:
        """Print to the terminal only."""
        if self.speaks:
            shown = escape_controls(text) if isinstance(text, str) else text
            self.console.print(shown, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()  # it leaves the line as it is
        for sink in self.sinks:
            sink.close()

    def _draw_progress(self) -> Table:
        done, left, figures = self.shown
        return progress_line(self.console.width, done, self.total_steps, left, figures)

    def _wall_s(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def _write(self, line: Line) -> None:
        if self.speaks and not self.sinks:  # with the first line, since a start may be refused
            run = Path(self.cfg.run)
            self.sinks.append(JsonLines(run / "metrics.jsonl"))
            if self.cfg.log.tensorboard:
                self.sinks.append(TensorBoard(run / "tensorboard"))
            if self.cfg.log.wandb is not None:
                self.sinks.append(WandB(self.cfg))
        for sink in self.sinks:
            sink.write(line)


def step_figures(window: list[StepLine]) -> list[str]:
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


def _pair_figures(window: list[StepLine]) -> list[str]:
    """Format the figures of objectives over pairs; nothing for others."""
    if window[-1].reward_accuracy is None:
        return []
    accuracy, margin = _mean(window, "reward_accuracy"), _mean(window, "rewards_margin")
    return [f"accuracy {100 * accuracy:.0f}%", f"margin {margin:.3g}"]


def duration(seconds: float) -> str:
    """Format seconds: 4000 as 1:06:40."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _mean(window: list[StepLine], name: str) -> float:
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
