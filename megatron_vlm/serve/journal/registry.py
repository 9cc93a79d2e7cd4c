"""Sessions, models, sampling sessions and checkpoints, each in a table of the journal."""

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.serve.journal.changes import put_sampler, release
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    Model,
    NamedCheckpoint,
    NewSampler,
    SamplingSession,
    Session,
)

_OF_KEY = "coalesce(key = ?, 1)"  # None for the key stands for all keys
_UNEXPIRED = "coalesce(expires > ?, 1)"


class Registry:
    """Registry of what the calls belong to. Each method is one short transaction."""

    def __init__(self, run: Path) -> None:
        self._store = Store(run)
        self._touched = DeferredWrites()

    @property
    def run(self) -> Path:
        """The folder of the run; all folders that the journal names are inside it."""
        return self._store.run

    # -- sessions

    def create_session(
        self, key: str, user_metadata: Mapping[str, Any], display_name: str | None
    ) -> str:
        """Create a session and return its id."""
        session, now = str(uuid.uuid4()), time.time()
        with self._store.write() as db:
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, NULL, NULL, ?, ?)",
                (session, key, now, now, json.dumps(dict(user_metadata)), display_name),
            )
        return session

    def touch_session(self, session: str) -> None:
        """Record that the client of the session is active."""
        self._touched.session(session)

    def finish_session(self, session: str, reason: str) -> None:
        """Finish a session whose client leaves. The first reason stays."""
        with self._store.write() as db:
            db.execute(
                "UPDATE sessions SET finished = ?, reason = ? WHERE id = ? AND finished IS NULL",
                (time.time(), reason, session),
            )

    def sessions(self, key: str | None = None) -> list[Session]:
        """Return all sessions, or those of a key, newest first."""
        return self._sessions(_OF_KEY, key)

    def session(self, session: str) -> Session | None:
        """Return the session with this id."""
        return _first_or_none(self._sessions("id = ?", session))

    def active_sessions(self, key: str | None, seconds: float) -> int:
        """Count the sessions that are not finished and were active within the last `seconds`."""
        with self._store.read() as db:
            (count,) = db.execute(
                f"SELECT count(*) FROM sessions WHERE {_OF_KEY} AND finished IS NULL AND heard > ?",
                (key, time.time() - seconds),
            ).fetchone()
        return count

    def _sessions(self, where: str, *values: Any) -> list[Session]:
        return [Session(**_fields(Session, row)) for row in self._rows("sessions", where, values)]

    # -- models

    def models(self, key: str | None = None) -> list[Model]:
        """Return all models, or those of a key, newest first."""
        return self._models(_OF_KEY, key)

    def model(self, model: str) -> Model | None:
        """Return the model with this id."""
        return _first_or_none(self._models("id = ?", model))

    def _models(self, where: str, *values: Any) -> list[Model]:
        rows = self._rows("models", where, values)
        return [
            Model(**self._with_full_paths(_fields(Model, row), "folder", "source")) for row in rows
        ]

    # -- sampling sessions

    def create_sampler(self, new: NewSampler) -> None:
        """Create a sampling session on a checkpoint or on the base model. A retry changes
        nothing."""
        with self._store.write() as db:
            put_sampler(self._store, db, new, time.time())

    def join_sampler(self, sampler: str) -> int:
        """Return a number from 1 for another client of this sampling session."""
        with self._store.write() as db:
            db.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            row = db.execute("SELECT clients FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return row["clients"]

    def samplers(self, key: str | None = None) -> list[SamplingSession]:
        """Return sampling sessions that have not ended, newest first, optionally those of a key."""
        return self._samplers(_OF_KEY, key)

    def sampler(self, sampler: str) -> SamplingSession | None:
        """Return the sampling session with this id, if it has not ended."""
        return _first_or_none(self._samplers("id = ?", sampler))

    def _samplers(self, where: str, *values: Any) -> list[SamplingSession]:
        rows = self._rows("samplers", f"ended IS NULL AND {where}", values)
        return [
            SamplingSession(**self._with_full_paths(_fields(SamplingSession, row), "folder"))
            for row in rows
        ]

    # -- checkpoints

    def checkpoints(
        self, key: str | None = None, model: str | None = None
    ) -> list[NamedCheckpoint]:
        """Return unexpired checkpoints, newest first, optionally only those of a key or of a
        model."""
        now = time.time()
        where = f"{_OF_KEY} AND coalesce(model = ?, 1) AND {_UNEXPIRED}"
        return self._checkpoints(where, key, model, now)

    def checkpoint(self, path: str) -> NamedCheckpoint | None:
        """Return the checkpoint with this tinker path, if it has not expired."""
        return _first_or_none(self._checkpoints(f"path = ? AND {_UNEXPIRED}", path, time.time()))

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Set when the checkpoint expires; None means never."""
        with self._store.write() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def delete_checkpoint(self, path: str) -> None:
        """Delete the row of a checkpoint. Its folder is removed when no model and no sampling
        session needs it."""
        with self._store.write() as db:
            release(db, time.time(), "SELECT folder FROM checkpoints WHERE path = ?", path)
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def _checkpoints(self, where: str, *values: Any) -> list[NamedCheckpoint]:
        rows = self._rows("checkpoints", where, values)
        return [
            NamedCheckpoint(**self._with_full_paths(_fields(NamedCheckpoint, row), "folder"))
            for row in rows
        ]

    # -- rows of each table

    def _rows(self, table: str, where: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        """Return rows, newest first. `where` is SQL from this file, never from a client."""
        with self._store.read() as db:
            return db.execute(
                f"SELECT * FROM {table} WHERE {where} ORDER BY created DESC, rowid DESC",
                tuple(values),
            ).fetchall()

    def _with_full_paths(self, fields: dict[str, Any], *names: str) -> dict[str, Any]:
        return {**fields, **{name: self._store.folder(fields[name]) for name in names}}


def _fields(of: type, row: sqlite3.Row) -> dict[str, Any]:
    names: Any = of.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: row[name] for name in names}
    for name in ("user_metadata", "facts", "figures"):
        if name in values:
            values[name] = json.loads(values[name])
    return values


def _first_or_none(rows: list[Any]) -> Any:
    return rows[0] if rows else None


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
