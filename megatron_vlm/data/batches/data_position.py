"""Position of a run in its data, and the set of samples as the loader sees it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_vlm.data.batches.balance import RowSize
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example


@dataclass(frozen=True)
class Position:
    """The position of a run in its data: everything that a checkpoint needs to know about it."""

    epoch: int = 0
    taken: int = 0  # samples taken from this epoch
    stream: dict[str, Any] | None = None  # position in a stream


class SampleSource(Protocol):
    """A set of samples as the loader sees it: a DataSet or a StreamSet. If its samples are
    `known_ahead`, `epoch` reads nothing, and another process may iterate over it."""

    @property
    def known_ahead(self) -> bool: ...
    def epoch(self, start: Position) -> Iterator[tuple[Any, RowSize, Position]]: ...
    @property
    def reader(self) -> Reader: ...
    def rows(self, handle: Any) -> list[Row]: ...
    def example(self, handle: Any) -> Example: ...
    def reference(self, handle: Any) -> list[float] | None: ...
    def faults(self) -> tuple[Counter[str], list[str]]: ...
