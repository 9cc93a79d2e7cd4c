"""Comparisons of gradients and figures with those of a reference."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def relative_errors(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference to each wanted tensor, over its own norm unless that is
    0."""
    return {
        name: float((found[name] - each).norm()) / (float(each.norm()) or 1.0)
        for name, each in want.items()
    }


def check_worst(
    errors: Mapping[str, float], tolerance: float, record_property: Callable[[str, object], None]
) -> None:
    """Record the largest error, and require that it is within the tolerance."""
    worst = max(errors, key=errors.__getitem__)
    record_property("worst", errors[worst])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e} of {len(errors)} compared"


def same(one: Any, other: Any) -> bool:
    """Return whether two nested results have the same bits, where nan equals nan."""
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
