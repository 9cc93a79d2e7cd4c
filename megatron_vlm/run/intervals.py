"""Intervals between evaluations and between checkpoints: by the clock, in steps or in epochs."""

import math
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_vlm.config.evaluation_checks import DEFAULT_MINUTES, DEFAULT_STEPS
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.distributed.agreement import all_reduce_max


class DefaultInterval:
    """The interval of a group that sets none. Rank 0's clock decides for all ranks."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.monotonic):
        self.device, self.now = device, now
        self.restart()

    def restart(self) -> None:
        """Let the interval begin now."""
        self.began = self.now()

    def is_over(self, step: int) -> bool:
        """Return whether the interval ends with a step, after which `step` steps are done. A
        collective."""
        is_late = dist.get_rank() == 0 and self.now() - self.began >= 60 * DEFAULT_MINUTES
        return step % DEFAULT_STEPS == 0 or bool(all_reduce_max(int(is_late), self.device))


class Interval(Protocol):
    """The two keys of `eval` and `checkpoint`, of which at most one is set."""

    @property
    def every(self) -> int | None: ...

    @property
    def every_epochs(self) -> float | None: ...


def is_due(
    interval: Interval,
    step: int,
    before: Position,
    after: Position,
    samples: int | None,
    is_default_over: bool = False,
) -> bool:
    """Return whether an interval ends with a step, after which `step` steps are done. The step took
    the samples between two positions in the data, and `samples` are those of an epoch.
    `is_default_over`: whether the DefaultInterval ends with this step.

    An interval in epochs ends with the step that takes its last sample. The last step of an epoch
    takes the remaining samples, so the end of an epoch is always that of a step.
    """
    if interval.every is not None:
        return interval.every > 0 and step % interval.every == 0
    if interval.every_epochs is None:
        return is_default_over
    assert samples is not None, "config/evaluation_checks.py: a stream counts steps"
    length = Fraction(str(interval.every_epochs))  # 0.1 is a tenth, which no float is
    return _intervals(after, samples, length) > _intervals(before, samples, length)


def _intervals(position: Position, samples: int, length: Fraction) -> int:
    """Return the number of whole intervals up to a position."""
    return math.floor((position.epoch + Fraction(position.taken, samples)) / length)
