"""Who waits for the journal is woken, within this process."""

import threading
from collections.abc import Callable, Sequence

from megatron_vlm.serve.journal.journal_records import CompletedCall

Listener = Callable[[Sequence[CompletedCall]], None]


class Notifier:
    """The engine's thread waits here for calls; the front hears which promises were kept."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = False
        self._listeners: list[Listener] = []
        self._ringers: list[Callable[[], None]] = []

    def ring(self) -> None:
        """There may be a call that can be done, or another reason to look."""
        with self._condition:
            self._rung = True
            self._condition.notify_all()
            ringers = tuple(self._ringers)
        for ringer in ringers:
            ringer()

    def when_rung(self, ringer: Callable[[], None]) -> None:
        """Have `ringer` called each time, in the thread that rings: for whoever does not wait here.
        It must be quick and not raise."""
        with self._condition:
            self._ringers.append(ringer)

    def wait(self, seconds: float | None) -> bool:
        """Until it rings, or has rung since the last time; whether it has."""
        with self._condition:
            rung = self._condition.wait_for(lambda: self._rung, seconds)
            self._rung = False
            return rung

    def listen(self, listener: Listener) -> None:
        """Have `listener` called with the promises that were just kept, in the thread that kept
        them. It must be quick and not raise."""
        with self._condition:
            self._listeners.append(listener)

    def kept(self, promises: Sequence[CompletedCall]) -> None:
        """These promises were kept."""
        if not promises:
            return
        with self._condition:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(promises)
