"""Bounds of numbers, as parts of their types: `Annotated[int, Range(1)]`. One function reads them
from the fields of a dataclass."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from megatron_vlm.errors import ConfigError

_MAX_INT32 = 2**31 - 1  # counts fit into 32 bits everywhere
_YEAR = 365 * 24 * 60  # minutes


@dataclass(frozen=True)
class Range:
    """Range from `min` to `max`. An open end is itself not allowed."""

    min: float
    max: float = _MAX_INT32
    is_min_open: bool = False
    is_max_open: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        above = value > self.min if self.is_min_open else value >= self.min
        below = value < self.max if self.is_max_open else value <= self.max
        return above and below and abs(value) <= sys.float_info.max  # nan fails all three

    def __str__(self) -> str:
        lower = f"more than {self.min}" if self.is_min_open else f"{self.min}"
        if self.max == _MAX_INT32:
            return lower if self.is_min_open else f"at least {self.min}"
        if math.isinf(self.max):
            return f"a finite number, {lower}" + " or more" * (not self.is_min_open)
        return f"{lower} to {'less than ' * self.is_max_open}{self.max}"


Count = Annotated[int, Range(0)]
Natural = Annotated[int, Range(1)]
DraftTokens = Annotated[int, Range(0, 4)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Port = Annotated[int, Range(0, 65535)]
NsSteps = Annotated[int, Range(1, 99)]  # torch.optim.Muon's
FrameCount = Annotated[int, Range(2)]  # a patch covers two frames
NonNegative = Annotated[float, Range(0, math.inf, is_max_open=True)]
AboveZero = Annotated[float, Range(0, math.inf, is_min_open=True, is_max_open=True)]
AboveZero32 = Annotated[float, Range(0, is_min_open=True)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, is_max_open=True)]
ShareAboveZero = Annotated[float, Range(0, 1, is_min_open=True)]
Minutes = Annotated[float, Range(0, _YEAR, is_min_open=True)]
FailedReward = Annotated[float, Range(-1e6, 1e6)]


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Refuse a value of a dataclass that its type does not allow: a number that is out of its
    range, or a text that is not among the choices. Null is left to the other checks."""
    for name, kind in get_type_hints(type(settings), include_extras=True).items():
        key, value = prefix + name, getattr(settings, name)
        if is_dataclass(kind):
            check_bounds(value, f"{key}.")
        elif get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(key=key, found=value, allowed=get_args(kind))
        if (allowed := violated_range(kind, value)) is not None:
            or_null = ", or null" * (type(None) in get_args(kind))
            raise ConfigError(key=key, found=value, allowed=f"{allowed}{or_null}")


def violated_range(kind: Any, value: Any) -> Range | None:
    """Return the first range of a type that a number of the value is not in, or None."""
    is_tuple = get_origin(kind) is tuple and isinstance(value, tuple)
    numbers = value if is_tuple else [*_numbers(value)]
    outside = (r for r in ranges_of(kind) if any(number not in r for number in numbers))
    return next(outside, None)


def ranges_of(kind: Any) -> Iterator[Range]:
    """Yield the ranges in a type and its parts."""
    if isinstance(kind, Range):
        yield kind
    for part in get_args(kind):
        yield from ranges_of(part)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif value is not None and not isinstance(value, str):
        yield value
