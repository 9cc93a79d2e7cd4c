"""Interface for the environments in users' files. It needs only the standard library.

A reward function, `f(record, answer)`, plain or `async`, returns a number, or a mapping with
"reward" and more figures: it is an environment of one turn.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# A message has the form of those in a record's `messages`. A picture is a PIL image, its bytes or a
# path, in {"type": "image", "image": ...}.
Message = Mapping[str, Any]
Opening = Sequence[Message] | None  # None: the messages of the record itself


@dataclass(frozen=True)
class EnvStep:
    """Response of an environment to an answer."""

    reward: float = 0.0  # the rewards of all turns add up
    messages: Sequence[Message] = ()  # the next messages; if empty, the episode has ended
    figures: Mapping[str, float] = field(default_factory=dict)  # more metrics to report, by name
    tools: Sequence[Mapping[str, Any]] | None = None  # the model's from now on; None: as before
    is_new: bool = False  # `messages` are a whole conversation, in place of all that was before


class Environment(Protocol):
    """Environment of a single episode. Its class is called without arguments. If its process has to
    be restarted, a new object receives the same record and the same answers, and must reach the
    same state with them. Both methods may be coroutines."""

    def reset(self, record: Mapping[str, Any]) -> Opening | EnvStep | Awaitable[Opening | EnvStep]:
        """Return the first messages, in an EnvStep if there are tools, or None for the record's."""

    def step(self, answer: str) -> EnvStep | Awaitable[EnvStep]:
        """Return the response to an answer."""
