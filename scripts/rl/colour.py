"""The reward of the colour task, which compares the answer with that of the record."""

from collections.abc import Mapping
from typing import Any


def right(record: Mapping[str, Any], answer: str) -> float:
    """Return 1 for the record's own answer, else 0."""
    return float(answer == record["messages"][-1]["content"])
