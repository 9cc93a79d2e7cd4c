"""Progress of a run: the steps that are done, the best scores, and whether the next evaluation or
checkpoint is due, by the clock, in steps or in epochs."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.evaluation_checks import DEFAULT_MINUTES, DEFAULT_STEPS, epochs_between
from megatron_vlm.config.schema import CheckpointConfig, Config
from megatron_vlm.data.batches.order import Position
from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.training.data_fingerprint import Fingerprint
from megatron_vlm.training.frozen_inputs import FrozenInput, inputs_from_json


@dataclass(frozen=True)
class Progress:
    """The steps that are done, and where the data continues. A checkpoint has it, too."""

    step: int = 0
    position: Position = field(default_factory=Position)
    data: Fingerprint = field(default_factory=Fingerprint)
    best_of: str | None = None  # the score in `best`: checkpoint.best
    best: float | None = None
    best_step: int | None = None
    tokens: int | None = 0  # trained tokens; None if the run began in a version without this
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # by set, last evaluation
    scored_step: int | None = None
    waited: int = 0  # evaluations since the last one that train.early_stopping counts as better
    waited_from: float | None = None  # the score of that one
    frozen: dict[str, FrozenInput] = field(default_factory=dict)  # by key

    def with_best(
        self, checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]
    ) -> "Progress":
        """Return the progress with these scores, if checkpoint.best makes them the best so far."""
        value = _deciding(checkpoint, name, scores)
        if value is None or not math.isfinite(value):
            return self
        known = self.best if self.best_of == checkpoint.best else None
        if not _is_better(checkpoint, value, known):
            return self
        return replace(self, best_of=checkpoint.best, best=value, best_step=self.step)

    def with_patience(self, cfg: Config, name: str, scores: Mapping[str, float]) -> "Progress":
        """Return the progress after these scores of a set, as train.early_stopping counts. Call it
        before `with_best`, which notes by which score the progress counts."""
        value = _deciding(cfg.checkpoint, name, scores)
        if value is None:
            return self
        known = self.waited_from if self.best_of == cfg.checkpoint.best else None
        delta = cfg.train.early_stopping_delta
        if math.isfinite(value) and _is_better(cfg.checkpoint, value, known, delta):
            return replace(self, waited=0, waited_from=value)
        return replace(self, waited=self.waited + 1)

    def has_waited(self, cfg: Config) -> bool:
        """Return whether train.early_stopping ends the run here."""
        patience = cfg.train.early_stopping
        is_counted = self.best_of in (None, cfg.checkpoint.best)
        return patience is not None and is_counted and self.waited >= patience

    def with_scores(self, name: str, scores: Mapping[str, float]) -> "Progress":
        """Return the progress with these scores of a set. Scores of an earlier step are dropped."""
        other_scores = self.scores if self.scored_step == self.step else {}
        set_scores = {key: value for key, value in scores.items() if key != "seconds"}
        return replace(self, scores={**other_scores, name: set_scores}, scored_step=self.step)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Progress":
        position, data = Position(**saved["position"]), Fingerprint.from_json(saved["data"])
        read = {"position": position, "data": data, "frozen": inputs_from_json(saved)}
        return Progress(**saved | read)


def _deciding(checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]) -> float | None:
    """Return the score that checkpoint.best names; None if of another set, nan if it is missing."""
    set_name, _, score = (checkpoint.best or "").rpartition("/")
    return scores.get(score, math.nan) if set_name == name else None


def _is_better(
    checkpoint: CheckpointConfig, value: float, known: float | None, delta: float = 0.0
) -> bool:
    """Return whether a value of the score is better than the known one by more than `delta`."""
    if known is None:
        return True
    lower_is_better = (checkpoint.best or "").endswith("/loss")
    return (known - value if lower_is_better else value - known) > delta


class DefaultInterval:
    """The interval of a group that sets none. Rank 0's clock decides for all ranks."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.now = now
        self.restart()

    def restart(self) -> None:
        """Let the interval begin now."""
        self.began = self.now()

    def is_over(self, step: int) -> bool:
        """Return whether the interval ends once `step` steps are done. A collective."""
        is_late = dist.get_rank() == 0 and self.now() - self.began >= 60 * DEFAULT_MINUTES
        return step % DEFAULT_STEPS == 0 or bool(all_reduce_max(int(is_late)))


def is_due(
    every: int | str | None,
    step: int,
    before: Position,
    after: Position,
    samples: int | None,
    is_default_over: bool = False,
) -> bool:
    """Return whether an interval such as eval.every ends with a step, which took the samples
    between two positions. `samples`: an epoch's; `is_default_over`: for no interval. An
    interval in epochs ends with the step that takes its last sample, and no step crosses epochs."""
    if every is None:
        return is_default_over
    if isinstance(every, int):
        return every > 0 and step % every == 0
    length = epochs_between(every)
    assert samples is not None and length is not None, "config/evaluation_checks.py"
    return _intervals(after, samples, length) > _intervals(before, samples, length)


def _intervals(position: Position, samples: int, length: Fraction) -> int:
    """Return the number of whole intervals up to a position."""
    return math.floor((position.epoch + Fraction(position.taken, samples)) / length)
