"""Seconds that a process has spent in each phase of its run."""

import time
from collections import defaultdict


class PhaseTimes:
    """A clock of phases, each of which begins with a call."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "start", time.perf_counter()

    def begin(self, phase: str) -> None:
        """End the phase before, and begin this one."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. The phase goes on."""
        self.begin(self._phase)
        taken = {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
