"""Fair queue of calls: each API key gets the same share of the ranks' time. Within a key, each
model and each set of sampling weights gets the same share."""

import time
from collections.abc import Callable, Mapping, Sequence

from megatron_vlm.serve.journal.journal_records import Call

FORGOTTEN_S = 600.0
PER_SWAP = 4  # seconds of other work for each second in which weights are loaded into memory
MANY = 1000  # names that are kept before old ones are forgotten


class FairQueue:
    """Queue that counts the seconds that each key and each of its tenants has used. The one with
    the fewest seconds comes next.

    A key or tenant that was idle continues from the count of the one that was served last, where
    that count is higher. So it comes next at once, but it cannot save up turns while it is idle or
    sends few calls. A tenant whose weights must first be loaded into memory waits until it is some
    seconds behind the others. Otherwise models that do not fit into memory together would be
    swapped at every call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.had: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        # Lowest count of the pending keys (under ""), or of the pending tenants of a key.
        self.floor: dict[str, float] = {}

    def next(
        self,
        calls: Sequence[Call],
        tenant_of: Callable[[Call], str],
        delay_of: Callable[[Call], float] = lambda call: 0.0,
    ) -> Call:
        """Return the next call; calls of the same tenant stay in their order. `delay_of` returns by
        how many seconds the tenant of a call must be behind the others before it comes next."""
        first: dict[str, dict[str, Call]] = {}  # {key: {tenant: its first call}}
        for call in calls:
            first.setdefault(call.key, {}).setdefault(f"{call.key}/{tenant_of(call)}", call)
        delays = {
            key: {name: delay_of(call) for name, call in tenants.items()}
            for key, tenants in first.items()
        }
        key = self._least_served(
            "", {f"/{key}": min(tenants.values()) for key, tenants in delays.items()}
        )[1:]
        return first[key][self._least_served(key, delays[key])]

    def record_work(self, call: Call, tenant: str, seconds: float) -> None:
        """Count the seconds of a call, or of its share of a batch."""
        for name in (f"/{call.key}", f"{call.key}/{tenant}"):
            self.had[name] = self.had.get(name, 0.0) + seconds
            self.seen[name] = self.clock()

    def _least_served(self, group: str, delays: Mapping[str, float]) -> str:
        now, floor = self.clock(), self.floor.get(group, 0.0)
        for name in delays:
            # A name whose calls have been pending all the time is at the floor or above it already.
            self.had[name] = max(self.had.get(name, 0.0), floor)
            self.seen[name] = now
        chosen = min(delays, key=lambda name: self.had[name] + delays[name])
        self.floor[group] = min(self.had[name] for name in delays)
        self._forget(now)
        return chosen

    def _forget(self, now: float) -> None:
        if len(self.seen) < MANY:
            return
        for name in [
            name for name, last_seen in self.seen.items() if now - last_seen > FORGOTTEN_S
        ]:
            del self.seen[name], self.had[name]
            if name.startswith("/"):  # a key; its tenants were last seen at the same time or before
                self.floor.pop(name[1:], None)
