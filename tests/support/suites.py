"""Which suite plays which cases of a test: `make test` the quick ones, `make test-full` all others,
but for those that are slow."""

from collections.abc import Iterable
from typing import Any

import pytest

FULL, SLOW = pytest.mark.full, pytest.mark.slow


def quick(names: Iterable[Any], cases: Iterable[Any], rest: Any = FULL) -> list[Any]:
    """Return the cases, of which all but these have the mark of the rest."""
    return [pytest.param(case, marks=() if case in names else rest) for case in cases]
