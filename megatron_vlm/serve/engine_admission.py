"""Admission of samples to an engine: which call comes next, and when the weights are changed.

An engine draws with one set of full weights at a time. With the base model's weights it also draws
with several adapters. The fair queue chooses the next call, as for the ranks (fair_queue.py). Where
that call does not fit with the calls in progress, no other call enters until it does, so no call
waits forever.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.engines.sampler import Capacity
from megatron_vlm.serve.engine_weights import SampleWeights
from megatron_vlm.serve.fair_queue import PER_SWAP, FairQueue
from megatron_vlm.serve.journal.journal_records import Call

MAX_ADMITTED_BYTES = 256 * 2**20  # maximum bytes of their bodies; a single call may have more
ENTRY_S = 1e-3  # seconds that a call counts at its start, so that keys take turns

Asked = tuple[Call, SampleWeights]
Queue = tuple[str, SampleWeights]  # a key, and the weights that its calls need


@dataclass
class InFlight:
    """Call in progress."""

    call: Call
    wanted: SampleWeights
    since: float  # time up to which its share of the engine's time is counted


class Admission:
    """Counter of the calls in progress and of the engine's time for each key and its weights."""

    def __init__(self, capacity: Capacity, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.clock = capacity, clock
        self.turns = FairQueue(clock)
        self.wants: dict[str, SampleWeights] = {}  # {request id: weights} of waiting calls
        self.queues: dict[Queue, dict[str, Call]] = {}  # waiting calls, in their order
        self.inside: dict[str, InFlight] = {}
        self.closed = False

    def wait(self, call: Call, weights: SampleWeights) -> None:
        """Add a call to the queue. Calls must be added in their order."""
        self.wants[call.request_id] = weights
        self.queues.setdefault((call.key, weights), {})[call.request_id] = call

    def forget(self, request_id: str) -> None:
        """Remove a call from the queue, if it is there."""
        if (weights := self.wants.pop(request_id, None)) is None:
            return
        for queue in [(key, other) for key, other in self.queues if other == weights]:
            self.queues[queue].pop(request_id, None)
            if not self.queues[queue]:
                del self.queues[queue]

    def all_of(self, weights: SampleWeights) -> list[Call]:
        """Return the calls that wait for these weights."""
        queues = [calls for (_, other), calls in self.queues.items() if other == weights]
        return [call for calls in queues for call in calls.values()]

    def next(self, whole: Path | None, swap_s: float) -> Asked | None:
        """Return the call whose turn it is, if it fits with the calls in progress. A call that
        needs other full weights than `whole`, the engine's current ones, is returned only when no
        call is in progress. `swap_s`: seconds that a change of the full weights takes."""
        if not self.queues or self.closed:
            return None

        def delay(call: Call) -> float:
            return 0.0 if self.wants[call.request_id].whole == whole else PER_SWAP * swap_s

        def tenant(call: Call) -> str:
            return f"{self.wants[call.request_id]}"

        heads = [next(iter(queue.values())) for queue in self.queues.values()]
        call = self.turns.next(heads, tenant, delay)
        weights = self.wants[call.request_id]
        return (call, weights) if self._has_room(call, weights, whole) else None

    def enter(self, call: Call, weights: SampleWeights) -> None:
        """Move a call from the queue to the calls in progress."""
        self.forget(call.request_id)
        self.inside[call.request_id] = InFlight(call, weights, self.clock())
        self.turns.record_work(call, f"{weights}", ENTRY_S)

    def leave(self, call: Call) -> None:
        """Remove a call from the calls in progress."""
        self._charge(self.inside[call.request_id], self.clock())
        del self.inside[call.request_id]

    def _has_room(self, call: Call, weights: SampleWeights, whole: Path | None) -> bool:
        if not self.inside:
            return True
        calls, adapters = len(self.inside) + 1, {weights.adapter}
        size = call.size
        for flight in self.inside.values():
            adapters.add(flight.wanted.adapter)
            size += flight.call.size
        return (
            weights.whole == whole
            and calls <= self.capacity.samples
            and size <= MAX_ADMITTED_BYTES
            and len(adapters - {None}) <= self.capacity.adapters
        )

    def count(self) -> None:
        """Charge the engine's time until now to the calls in progress."""
        now = self.clock()
        for flight in self.inside.values():
            self._charge(flight, now)

    def _charge(self, one: InFlight, now: float) -> None:
        """Charge a call its share, which all calls have, of the time since the last charge."""
        self.turns.record_work(one.call, f"{one.wanted}", (now - one.since) / len(self.inside))
        one.since = now
