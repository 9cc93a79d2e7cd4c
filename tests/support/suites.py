"""Marks of cases by the suite that plays them: `make test`, `make test-full` (those marked full as
well) or `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FULL, SLOW = pytest.mark.full, pytest.mark.slow


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=FULL)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=SLOW)


def in_turn(size: int, group: str) -> list[Any]:
    """Return the marks of cases of which each commit plays so many in `make test-full`."""
    return [FULL, pytest.mark.rotate(size, group=group)]


def quick(chosen: Collection[Any], cases: Iterable[Any], rest: Any = FULL) -> list[Any]:
    """Return the cases. `make test` plays the chosen ones, and the others have the mark `rest`."""
    cases = list(cases)
    assert any(case in chosen for case in cases), (chosen, cases)
    return [pytest.param(case, marks=() if case in chosen else rest) for case in cases]
