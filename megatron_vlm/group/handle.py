"""A result that may still be on its way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class Handle(Generic[T]):
    """`result` waits. Calls to one group are done in the order in which they were made, whether
    or not results were waited for."""

    wait: Callable[[float | None], T]  # seconds at most
    _kept: list[T] = field(default_factory=list)

    def result(self, timeout: float | None = None) -> T:
        """The result, or the error of the worker that failed. TimeoutError where it is not there
        after `timeout` seconds; it can then be asked again."""
        if not self._kept:
            self._kept.append(self.wait(timeout))
        return self._kept[0]

    def then(self, change: Callable[[T], Any]) -> "Handle[Any]":
        """A handle of what `change` makes of the result."""
        return Handle(lambda timeout: change(self.result(timeout)))
