"""Which samples an engine is asked next, and when those of other weights have their turn.

An engine draws with one set of whole weights at a time, and beside the base model's with so many
adapters. Who comes next is decided as for the ranks (fair_queue.py); where it does not fit to what
is under way, nobody else comes in until it does, so nobody waits for ever.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.serve.fair_queue import PER_SWAP, FairQueue
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.vllm_weights import SampleWeights

AT_ONCE = 512  # calls under way, for each engine: more than it draws at a time
MOST_BYTES = 256 * 2**20  # of their bodies, unless it is one
ENTRY_S = 1e-3  # that a call counts for at first, so that those of several keys come in by turns

Asked = tuple[Call, SampleWeights]
Queue = tuple[str, SampleWeights]  # calls of a key that want the same


@dataclass
class InFlight:
    """A call under way, whose part of the engine's time was counted until then."""

    call: Call
    wanted: SampleWeights
    since: float


class Admission:
    """Counts what is under way, and for whom the engine works."""

    def __init__(
        self, adapters: int, engines: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.adapters, self.most, self.clock = adapters, AT_ONCE * engines, clock
        self.turns = FairQueue(clock)
        self.wants: dict[str, SampleWeights] = {}  # of calls that wait
        self.queues: dict[Queue, dict[str, Call]] = {}  # these, in their order
        self.inside: dict[str, InFlight] = {}
        self.active: Counter[Path] = Counter()  # calls under way of each adapter
        self.size = 0  # of their bodies
        self.closed = False

    def wait(self, call: Call, wanted: SampleWeights) -> None:
        """It is to come in; calls are told of in their order."""
        self.wants[call.request_id] = wanted
        self.queues.setdefault((call.key, wanted), {})[call.request_id] = call

    def forget(self, request_id: str) -> None:
        """It need not come in, if it waits."""
        if (wanted := self.wants.pop(request_id, None)) is None:
            return
        for queue in [(key, other) for key, other in self.queues if other == wanted]:
            self.queues[queue].pop(request_id, None)
            if not self.queues[queue]:
                del self.queues[queue]

    def all_of(self, wanted: SampleWeights) -> list[Call]:
        """Calls that wait for these weights."""
        found = [mine for (_, other), mine in self.queues.items() if other == wanted]
        return [call for mine in found for call in mine.values()]

    def next(self, whole: Path | None, swap_s: float) -> Asked | None:
        """The call whose turn it is, if it fits to what is under way. If it wants other whole
        weights than `whole`, which are there, nothing is under way. `swap_s`: what it takes to
        change them."""
        if not self.queues or self.closed:
            return None

        def delay(call: Call) -> float:
            return 0.0 if self.wants[call.request_id].whole == whole else PER_SWAP * swap_s

        def tenant(call: Call) -> str:
            return f"{self.wants[call.request_id]}"

        heads = [next(iter(queue.values())) for queue in self.queues.values()]
        call = self.turns.next(heads, tenant, delay)
        wanted = self.wants[call.request_id]
        return (call, wanted) if self._fits(call, wanted, whole) else None

    def close(self) -> None:
        """Nobody comes in any longer."""
        self.closed = True

    def enter(self, call: Call, wanted: SampleWeights) -> None:
        """It is under way."""
        self.forget(call.request_id)
        self.inside[call.request_id] = InFlight(call, wanted, self.clock())
        self.size += call.size
        if wanted.adapter is not None:
            self.active[wanted.adapter] += 1
        self.turns.worked(call, f"{wanted}", ENTRY_S)

    def leave(self, call: Call) -> None:
        """It is not any longer."""
        one = self.inside[call.request_id]
        self._charge(one, self.clock())
        del self.inside[call.request_id]
        self.size -= call.size
        if one.wanted.adapter is not None:
            self.active[one.wanted.adapter] -= 1
            if not self.active[one.wanted.adapter]:
                del self.active[one.wanted.adapter]

    def _fits(self, call: Call, wanted: SampleWeights, whole: Path | None) -> bool:
        if not self.inside:
            return True
        if len(self.inside) >= self.most or self.size + call.size > MOST_BYTES:
            return False
        if wanted.whole != whole:
            return False
        new = wanted.adapter is not None and wanted.adapter not in self.active
        return not new or len(self.active) < self.adapters

    def count(self) -> None:
        """For whom the engine has worked until now."""
        now = self.clock()
        for one in self.inside.values():
            self._charge(one, now)

    def _charge(self, one: InFlight, now: float) -> None:
        """Its part of the time since then, which those under way share."""
        self.turns.worked(one.call, f"{one.wanted}", (now - one.since) / len(self.inside))
        one.since = now
