"""A prompt whose samples are in progress."""

import time
from dataclasses import dataclass, field

from frames import Message

TELL_S = 0.05  # seconds between two messages about the tokens of a streamed request


@dataclass
class PendingRequest:
    """A prompt whose samples are in progress."""

    expected: list[int]  # ids of the prompt, with all placeholders
    samples: list[Message | None]
    names: list[str] = field(default_factory=list)  # names of vLLM's requests
    top_k: int | None = None  # set if the prompt itself is scored
    routing_start: int | None = None  # first token whose experts are returned; None: there is none
    tables: dict[int, bytes] = field(default_factory=dict)  # experts by sample
    drawn: dict[int, list[int]] = field(default_factory=dict)  # tokens by sample, if streamed
    told: dict[int, int] = field(default_factory=dict)  # number of tokens that were told
    told_at: float = float("-inf")

    def news(self, place: int, ids: list[int]) -> list[list[object]] | None:
        """Record the tokens of a sample. If it is time to tell, return for each sample the number
        of its tokens that were told before, and those that follow."""
        self.drawn[place] = ids
        if (now := time.monotonic()) < self.told_at + TELL_S:
            return None
        self.told_at, news = now, list[list[object]]()
        for number in range(len(self.samples)):
            drawn, told = self.drawn.get(number, []), self.told.get(number, 0)
            news.append([told, drawn[told:]])
            self.told[number] = len(drawn)
        return news
