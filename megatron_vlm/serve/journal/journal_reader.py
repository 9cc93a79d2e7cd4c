"""Questions to the journal. Each is one short read, which does not wait for the writer."""

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from megatron_vlm.serve.journal.calls import Bounds, live_models
from megatron_vlm.serve.journal.cleanup import folders
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Call,
    Event,
    Failure,
    Model,
    NamedCheckpoint,
    Outcome,
    Result,
    SamplingSession,
    Session,
)
from megatron_vlm.serve.protocol.payloads import RequestError

_OF_KEY = "coalesce(key = ?, 1)"  # None for the key stands for all keys
_UNEXPIRED = "coalesce(expires > ?, 1)"
_TABLES: Mapping[type, str] = {
    Session: "sessions",
    Model: "models",
    SamplingSession: "samplers",
    NamedCheckpoint: "checkpoints",
}
_JSON = {"user_metadata", "facts", "figures", "details"}
_FOLDERS = {"folder", "source"}
_CALL = (
    *("request_id", "number", "kind", "owner", "seq", "key", "seed", "attempts", "accepted"),
    *("size", "changes_state"),
)
_COLUMNS = ", ".join(f"calls.{name}" for name in _CALL)
T = TypeVar("T")


class JournalReader:
    """Reader of the calls that wait and of their results, and of the sessions, models, sampling
    sessions and checkpoints that they belong to."""

    def __init__(self, run: Path, bounds: Bounds) -> None:
        self._store, self._bounds = Store(run), bounds

    @property
    def run(self) -> Path:
        """The folder of the run; all folders that the journal names are inside it."""
        return self._store.run

    # -- sessions, models, sampling sessions and checkpoints: all, or one key's, newest first

    def sessions(self, key: str | None = None) -> list[Session]:
        return self._records(Session, _OF_KEY, key)

    def session(self, session: str) -> Session | None:
        return _first_or_none(self._records(Session, "id = ?", session))

    def active_sessions(self, key: str | None, seconds: float) -> int:
        """Count the sessions that are not finished and were active within the last `seconds`."""
        active = f"{_OF_KEY} AND finished IS NULL AND heard > ?"
        sql = f"SELECT count(*) AS count FROM sessions WHERE {active}"
        return self._select(sql, key, time.time() - seconds)[0]["count"]

    def models(self, key: str | None = None) -> list[Model]:
        return self._records(Model, _OF_KEY, key)

    def model(self, model: str) -> Model | None:
        return _first_or_none(self._records(Model, "id = ?", model))

    def live_models(self) -> set[str]:
        """Return the ids of models whose client is active or waits for one of their calls."""
        with self._store.read() as db:
            return live_models(db, self._bounds)

    def samplers(self, key: str | None = None) -> list[SamplingSession]:
        """Return the sampling sessions that have not ended."""
        return self._records(SamplingSession, f"ended IS NULL AND {_OF_KEY}", key)

    def sampler(self, sampler: str) -> SamplingSession | None:
        """Return the sampling session with this id, if it has not ended."""
        return _first_or_none(self._records(SamplingSession, "ended IS NULL AND id = ?", sampler))

    def checkpoints(
        self, key: str | None = None, model: str | None = None
    ) -> list[NamedCheckpoint]:
        """Return the checkpoints that have not expired, optionally only one model's checkpoints."""
        where = f"{_OF_KEY} AND coalesce(model = ?, 1) AND {_UNEXPIRED}"
        return self._records(NamedCheckpoint, where, key, model, time.time())

    def checkpoint(self, path: str) -> NamedCheckpoint | None:
        """Return the checkpoint with this tinker path, if it has not expired."""
        where = f"path = ? AND {_UNEXPIRED}"
        return _first_or_none(self._records(NamedCheckpoint, where, path, time.time()))

    def events(self, key: str, since: float, until: float, limit: int) -> list[Event]:
        """Return the events of a key in this time, oldest first; the newest ones if there are more
        than `limit`."""
        rows = self._select(
            "SELECT * FROM events WHERE key = ? AND time >= ? AND time < ?"
            " ORDER BY time DESC, rowid DESC LIMIT ?",
            *(key, since, until, limit),
        )
        return [self._record(Event, row) for row in reversed(rows)]

    def folders(self) -> set[Path]:
        """Return every folder that a row names."""
        with self._store.read() as db:
            return {self.run / name for name in folders(db)}

    # -- calls that are not done

    def next_calls(self, ahead: int = 1, of_key: int = 512, samples: bool = True) -> list[Call]:
        """Return all calls that may be done now, in the order in which they were accepted. For a
        model these are its next `ahead` calls up to the first gap, which must still be done in the
        order of seq. Creations, samples and unloads wait for nothing. A call with `attempts` above
        0 had started when the process died: done alone, it takes no other call along."""
        kinds = "" if samples else f" AND kind != '{SAMPLE}'"
        # Only the first calls of each key are listed, so that thousands of calls of one key do not
        # hide the others.
        free = self._select(
            f"SELECT {_COLUMNS} FROM (SELECT *, row_number() OVER (PARTITION BY key ORDER BY"
            f" number) AS place FROM calls WHERE done IS NULL AND model IS NULL{kinds}) AS calls"
            " WHERE place <= ?",
            of_key,
        )
        ranked = [(row["number"], _call(row)) for row in free]
        ordered = self._select(
            f"SELECT {_COLUMNS}, next_seq FROM models JOIN calls ON calls.owner = models.id"
            " AND seq BETWEEN next_seq AND next_seq + ? WHERE state = 'ready' AND done IS NULL",
            ahead - 1,
        )
        number = {(row["owner"], row["seq"]): row["number"] for row in ordered}
        for row in ordered:
            before = range(row["next_seq"], row["seq"])
            if all((row["owner"], seq) in number for seq in before):  # calls after a gap wait
                ranked.append((number[row["owner"], row["next_seq"]], _call(row)))
        # The later calls of a model follow its first one, in whichever order they arrived.
        ranked.sort(key=lambda one: (one[0], one[1].seq))
        return [call for _, call in ranked]

    def samples(self, after: int) -> list[Call]:
        """Return samples that are not done and were accepted after the call of this number."""
        return self._calls(f"done IS NULL AND kind = '{SAMPLE}' AND number > ?", after)

    def open_calls(self) -> list[Call]:
        """Return all calls that are not done, including those that wait for others."""
        return self._calls("done IS NULL")

    def body(self, request_id: str) -> bytes:
        """Return the decompressed body of a call: protobuf for forward_backward, otherwise JSON."""
        rows = self._select(
            "SELECT body FROM bodies JOIN calls USING (number) WHERE request_id = ?", request_id
        )
        if not rows:  # a sample may be dropped at any moment
            raise RequestError("is no longer kept", place=request_id)
        return rows[0]["body"]

    # -- calls that are done

    def result(self, request_id: str) -> Result | None:
        """Return the state of a promise, or None if it is unknown or no longer known."""
        rows = self._select(
            "SELECT key, kind, done, dropped, succeeded, content, content_type, error, category"
            " FROM calls LEFT JOIN answers USING (number) WHERE request_id = ?",
            request_id,
        )
        if not rows:
            return None
        [row] = rows
        outcome: Outcome | Failure | None = None
        if row["done"] is not None and not row["dropped"]:
            if row["succeeded"]:
                outcome = Outcome(row["content"], row["content_type"])
            else:
                outcome = Failure(row["error"], row["category"])
        return Result(row["key"], row["kind"], outcome, bool(row["dropped"]))

    def replay(self, model: str) -> list[Call]:
        """Return done calls that the model's durable state in `Model.folder` does not include, in
        order. Their results were already written: do them again, but do not finish them."""
        rows = self._select(
            f"SELECT {_COLUMNS} FROM calls JOIN models ON calls.model = models.id"
            " WHERE calls.model = ? AND changes_state = 1 AND succeeded = 1 AND seq > saved"
            " ORDER BY seq",
            model,
        )
        return [_call(row) for row in rows]

    def _calls(self, where: str, *values: Any) -> list[Call]:
        sql = f"SELECT {_COLUMNS} FROM calls WHERE {where} ORDER BY number"
        return [_call(row) for row in self._select(sql, *values)]

    def _records(self, of: type[T], where: str, *values: Any) -> list[T]:
        """Return records, newest first. `where` is SQL from this file, never from a client."""
        rows = self._select(
            f"SELECT * FROM {_TABLES[of]} WHERE {where} ORDER BY created DESC, rowid DESC", *values
        )
        return [self._record(of, row) for row in rows]

    def _record(self, of: Any, row: sqlite3.Row) -> Any:
        values = {each.name: row[each.name] for each in fields(of)}
        for name in values.keys() & _JSON:
            values[name] = json.loads(values[name])
        for name in values.keys() & _FOLDERS:
            values[name] = None if values[name] is None else self.run / values[name]
        return of(**values)

    def _select(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._store.read() as db:
            return db.execute(sql, values).fetchall()


def _call(row: sqlite3.Row) -> Call:
    values = {name: row[name] for name in _CALL}
    return Call(**{**values, "changes_state": bool(row["changes_state"])})


def _first_or_none(rows: list[T]) -> T | None:
    return rows[0] if rows else None
