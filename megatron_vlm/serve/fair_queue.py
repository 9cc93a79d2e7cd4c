"""Whose turn it is: each key gets the same share of the ranks' time, and of a key each model and
each set of weights that is sampled from."""

import time
from collections.abc import Callable, Mapping, Sequence

from megatron_vlm.serve.journal.journal_records import Call

FORGOTTEN_S = 600.0
PER_SWAP = 4  # seconds that go to others for each second in which weights are brought into memory
MANY = 1000  # names, before any is forgotten


class FairQueue:
    """Counts the seconds that were worked for each key and each of its tenants; who has had the
    least comes next. Who was away for a turn goes on from what the one who was served last had had
    by then, if that is more: it comes next at once, but nobody saves up turns by keeping still, or
    by asking for little. Who has to be brought into memory first waits until it has had some
    seconds less than the others: else models that do not fit there together would be swapped at
    every call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.had: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        self.floor: dict[str, float] = {}  # of the keys (""), and of the tenants of a key

    def next(
        self,
        calls: Sequence[Call],
        tenant_of: Callable[[Call], str],
        delay_of: Callable[[Call], float] = lambda call: 0.0,
    ) -> Call:
        """The call to do next; of those of one tenant the first. `delay_of` says how many seconds
        less a call's tenant must have had before it comes next."""
        first: dict[str, dict[str, Call]] = {}  # of each key, of each of its tenants
        for call in calls:
            first.setdefault(call.key, {}).setdefault(f"{call.key}/{tenant_of(call)}", call)
        delays = {
            key: {name: delay_of(call) for name, call in mine.items()}
            for key, mine in first.items()
        }
        key = self._least("", {f"/{key}": min(mine.values()) for key, mine in delays.items()})[1:]
        return first[key][self._least(key, delays[key])]

    def worked(self, call: Call, tenant: str, seconds: float) -> None:
        """A call was done, or its part of the work that was done for several."""
        for name in (f"/{call.key}", f"{call.key}/{tenant}"):
            self.had[name] = self.had.get(name, 0.0) + seconds
            self.seen[name] = self.clock()

    def _least(self, group: str, delays: Mapping[str, float]) -> str:
        now, floor = self.clock(), self.floor.get(group, 0.0)
        for name in delays:
            # Whoever asks all the time has had as much as the one who was served last, or more.
            self.had[name] = max(self.had.get(name, 0.0), floor)
            self.seen[name] = now
        chosen = min(delays, key=lambda name: self.had[name] + delays[name])
        self.floor[group] = min(self.had[name] for name in delays)
        self._forget(now)
        return chosen

    def _forget(self, now: float) -> None:
        if len(self.seen) < MANY:
            return
        for name in [name for name, seen in self.seen.items() if now - seen > FORGOTTEN_S]:
            del self.seen[name], self.had[name]
            if name.startswith("/"):  # a key, whose tenants were seen no later than itself
                self.floor.pop(name[1:], None)
