"""Where a run is in its data, and what the loader needs of a set of samples."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_vlm.data.batches.balance import RowSize
from megatron_vlm.data.tokens.row import PlacedRow


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: all that a checkpoint needs to know about it."""

    epoch: int = 0
    taken: int = 0  # samples of this epoch
    stream: dict[str, Any] | None = None  # where it is in a stream


class SampleSource(Protocol):
    """What the loader needs of a set of samples; DataSet and StreamSet have it. Where its samples
    are `known_ahead`, `epoch` reads nothing, and another process may go through it."""

    @property
    def known_ahead(self) -> bool: ...
    def epoch(self, start: Position) -> Iterator[tuple[Any, RowSize, Position]]: ...
    def row(self, handle: Any) -> PlacedRow: ...
    def faults(self) -> tuple[Counter[str], list[str]]: ...
