"""Tensors that arrive in pieces through shared memory.

This file needs only Python's standard library. A piece is what the memory holds at a time: a list
of parts {"name", "dtype", "shape", "bytes", "start", "offset", "count"}. A part is `count` bytes
that lie in the memory from `offset` on. In the tensor, of `bytes` bytes, they
begin at `start`. Tensors arrive one after the other, each from its beginning to its end.
"""

from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]  # JSON


class TensorAssembly:
    """The tensors of an update, of which at most one is incomplete. `allocate` makes the memory of
    a tensor, from the number of its bytes; it and `memory` are cut and filled with slices."""

    def __init__(self, memory: Any, allocate: Callable[[int], Any]):
        self.memory, self.allocate = memory, allocate
        self.values: Any = None  # values of the tensor that arrives
        self.filled = 0

    def take(self, parts: list[Message]) -> Iterator[tuple[Message, Any]]:
        """Copy a piece, and yield the last part and the values of each tensor that is complete."""
        for part in parts:
            if part["start"] == 0:
                self.values, self.filled = self.allocate(part["bytes"]), 0
            start, offset, count = part["start"], part["offset"], part["count"]
            assert start == self.filled, "a part is missing"
            self.values[start : start + count] = self.memory[offset : offset + count]
            self.filled += count
            if self.filled == part["bytes"]:
                yield part, self.values
                self.values = None
