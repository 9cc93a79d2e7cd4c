"""What users' files write environments with. It needs nothing but Python.

A reward function, `f(record, answer)`, plain or `async`, returns a number, or a mapping with
"reward" and more figures: it is an environment of one turn.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# As in a record's `messages`. A picture is a PIL image, its bytes or a path, in
# {"type": "image", "image": ...}.
Message = Mapping[str, Any]
Opening = Sequence[Message] | None  # None: the messages of the record itself


@dataclass(frozen=True)
class EnvStep:
    """What an environment makes of an answer."""

    reward: float = 0.0  # the rewards of all turns add up
    messages: Sequence[Message] = ()  # what it says next; empty: the episode has ended
    figures: Mapping[str, float] = field(default_factory=dict)  # more to report, by name


class Environment(Protocol):
    """One episode. Its class is called without arguments. Where its process has to be started
    again, it is made anew and given the same record and the same answers: with these it must come
    to the same state. Both methods may be coroutines."""

    def reset(self, record: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """The first messages; None for the record's own."""

    def step(self, answer: str) -> EnvStep | Awaitable[EnvStep]:
        """What comes of an answer."""
