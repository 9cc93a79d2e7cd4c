"""Intervals between evaluations and between checkpoints, in steps or in epochs."""

import math
from fractions import Fraction
from typing import Protocol

from megatron_vlm.data.batches.data_position import Position


class Interval(Protocol):
    """The two keys of `eval` and `checkpoint`, of which at most one is set."""

    @property
    def every(self) -> int | None: ...

    @property
    def every_epochs(self) -> float | None: ...


def is_due(
    interval: Interval, step: int, before: Position, after: Position, samples: int | None
) -> bool:
    """Return whether an interval ends with a step, after which `step` steps are done. The step took
    the samples between two positions in the data, and `samples` are those of an epoch.

    An interval in epochs ends with the step that takes its last sample. The last step of an epoch
    takes the remaining samples, so the end of an epoch is always that of a step.
    """
    if interval.every is not None:
        return step % interval.every == 0
    if interval.every_epochs is None:
        return False
    assert samples is not None, "config/evaluation_checks.py: a stream counts steps"
    length = Fraction(str(interval.every_epochs))  # 0.1 is a tenth, which no float is
    return _intervals(after, samples, length) > _intervals(before, samples, length)


def _intervals(position: Position, samples: int, length: Fraction) -> int:
    """Return the number of whole intervals up to a position."""
    return math.floor((position.epoch + Fraction(position.taken, samples)) / length)
