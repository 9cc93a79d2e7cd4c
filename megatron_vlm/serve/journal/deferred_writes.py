"""Small facts that need not reach the disk one by one: active clients and fetched results."""

import sqlite3
import threading
import time


class DeferredWrites:
    """Facts that stay in memory until the next sweep. A crash loses them, and things are kept
    longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, float] = {}
        self._sessions: dict[str, float] = {}

    def call(self, request_id: str) -> None:
        """Record that the result was sent."""
        with self._lock:
            self._calls.setdefault(request_id, time.time())

    def session(self, session: str) -> None:
        """Record that the client of the session is active."""
        with self._lock:
            self._sessions[session] = time.time()

    def write(self, db: sqlite3.Connection) -> None:
        """Write the recorded facts within a transaction."""
        with self._lock:
            calls, self._calls = self._calls, {}
            sessions, self._sessions = self._sessions, {}
        db.executemany(
            "UPDATE calls SET fetched = coalesce(fetched, ?) WHERE request_id = ?",
            [(when, name) for name, when in calls.items()],
        )
        db.executemany(
            "UPDATE sessions SET heard = ? WHERE id = ?",
            [(when, name) for name, when in sessions.items()],
        )
