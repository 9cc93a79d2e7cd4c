"""Notification of waiting threads within this process."""

import threading
from collections.abc import Callable, Sequence

from megatron_vlm.serve.journal.journal_records import CompletedCall

Listener = Callable[[Sequence[CompletedCall]], None]


class Notifier:
    """A condition on which the engine's thread waits for calls. Listeners in the HTTP server
    receive the completed calls."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = False
        self._listeners: list[Listener] = []
        self._callbacks: list[Callable[[], None]] = []

    def ring(self) -> None:
        """Wake the waiting threads, because there may be a call to do or another reason to look."""
        with self._condition:
            self._rung = True
            self._condition.notify_all()
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Register a function for threads that do not wait here. Each ring calls it in the ringing
        thread, so it must be quick and must not raise."""
        with self._condition:
            self._callbacks.append(callback)

    def wait(self, seconds: float | None) -> bool:
        """Wait for a ring, unless there was one since the last wait. Return whether there was
        one."""
        with self._condition:
            rung = self._condition.wait_for(lambda: self._rung, seconds)
            self._rung = False
            return rung

    def listen(self, listener: Listener) -> None:
        """Register `listener`, which is called with the calls that were just completed, in the
        thread that completed them. It must be quick and must not raise."""
        with self._condition:
            self._listeners.append(listener)

    def notify_completed(self, promises: Sequence[CompletedCall]) -> None:
        """Pass these completed calls to the listeners."""
        if not promises:
            return
        with self._condition:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(promises)
