"""Calls that wait, that are done, and that are done again after a restart."""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_vlm.serve.journal.accept import advance, fail, use_sampler
from megatron_vlm.serve.journal.changes import apply
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    CREATION,
    SAMPLE,
    Call,
    CompletedCall,
    Failure,
    Finished,
    ModelChange,
    Outcome,
    Result,
)

MAX_ATTEMPTS = 3
_CALL = (
    "request_id, number, kind, owner, seq, calls.key, calls.seed, attempts, accepted, size,"
    " changes_state"
)


def next_calls(db: sqlite3.Connection, ahead: int, of_key: int, samples: bool = True) -> list[Call]:
    """Return the calls that may be done now, in the order of acceptance. Calls without an order are
    limited to `of_key` for each key."""
    kinds = "" if samples else f" AND kind != '{SAMPLE}'"
    # A call of a model waits for the model and for the calls before it. Any other call waits for
    # nothing. Only the first calls of each key are listed, so that thousands of calls of one key do
    # not hide the others.
    free = db.execute(
        f"SELECT {_CALL} FROM (SELECT *, row_number() OVER (PARTITION BY key ORDER BY number)"
        f" AS place FROM calls WHERE done IS NULL AND model IS NULL{kinds}) AS calls"
        " WHERE place <= ?",
        (of_key,),
    )
    ranked = [(row["number"], _call(row)) for row in free]
    ordered = db.execute(
        f"SELECT {_CALL}, next_seq FROM models JOIN calls ON calls.owner = models.id"
        " AND seq BETWEEN next_seq AND next_seq + ? WHERE state = 'ready' AND done IS NULL",
        (ahead - 1,),
    ).fetchall()
    number = {(row["owner"], row["seq"]): row["number"] for row in ordered}
    for row in ordered:
        first = row["next_seq"]
        # Calls after a gap wait.
        if all((row["owner"], seq) in number for seq in range(first, row["seq"])):
            ranked.append((number[row["owner"], first], _call(row)))
    # The later calls of a model follow its first one, in whichever order they arrived.
    ranked.sort(key=lambda one: (one[0], one[1].seq))
    return [call for _, call in ranked]


def samples(db: sqlite3.Connection, after: int) -> list[Call]:
    """Return samples that are not done and were accepted after the call of this number, in
    order."""
    rows = db.execute(
        f"SELECT {_CALL} FROM calls WHERE done IS NULL AND kind = '{SAMPLE}' AND number > ?"
        " ORDER BY number",
        (after,),
    )
    return [_call(row) for row in rows]


def select_open_calls(db: sqlite3.Connection) -> list[Call]:
    """Return all calls that are not done, in the order of acceptance."""
    rows = db.execute(f"SELECT {_CALL} FROM calls WHERE done IS NULL ORDER BY number")
    return [_call(row) for row in rows]


def replay(db: sqlite3.Connection, model: str) -> list[Call]:
    """Return done calls that the model's durable state does not include, in the order of seq."""
    rows = db.execute(
        f"SELECT {_CALL} FROM calls JOIN models ON calls.model = models.id WHERE calls.model = ?"
        " AND changes_state = 1 AND succeeded = 1 AND seq > saved ORDER BY seq",
        (model,),
    )
    return [_call(row) for row in rows]


def body(db: sqlite3.Connection, request_id: str) -> bytes:
    """Return the body that the client sent."""
    row = db.execute(
        "SELECT body FROM bodies JOIN calls USING (number) WHERE request_id = ?", (request_id,)
    ).fetchone()
    assert row is not None, f"the body of {request_id} is no longer kept"
    return row["body"]


def mark_started(db: sqlite3.Connection, request_ids: Sequence[str]) -> list[str]:
    """Count an attempt of each call, and return the calls that are still to be done."""
    open_ids = []
    for request_id in request_ids:
        cursor = db.execute(
            "UPDATE calls SET attempts = attempts + 1 WHERE request_id = ? AND done IS NULL",
            (request_id,),
        )
        if cursor.rowcount:
            open_ids.append(request_id)
    return open_ids


def undo_attempt(db: sqlite3.Connection, request_ids: Sequence[str]) -> None:
    """Take back one attempt of each call, since the process ends in good order before doing it."""
    db.executemany(
        "UPDATE calls SET attempts = attempts - 1 WHERE request_id = ? AND done IS NULL",
        [(request_id,) for request_id in request_ids],
    )


def finish_call(store: Store, db: sqlite3.Connection, finished: Finished) -> list[str]:
    """Write a result and its changes, or nothing if the call already has a result. Return the calls
    that are now done: this one, and those that fail with it."""
    row = db.execute(
        "SELECT number, kind, owner, seq, model, changes_state FROM calls"
        " WHERE request_id = ? AND done IS NULL",
        (finished.request_id,),
    ).fetchone()
    if row is None:
        return []
    now, outcome = time.time(), finished.outcome
    if isinstance(outcome, Failure):
        fail(db, finished.request_id, outcome, now)
    else:
        db.execute(
            "UPDATE calls SET done = ?, succeeded = 1, content_type = ? WHERE number = ?",
            (now, outcome.content_type, row["number"]),
        )
        db.execute("INSERT INTO answers VALUES (?, ?)", (row["number"], outcome.content))
    if isinstance(outcome, Failure) or not (row["model"] and row["changes_state"]):
        db.execute("DELETE FROM bodies WHERE number = ?", (row["number"],))
    if row["model"] is not None:
        advance(db, row["model"])
        db.execute("UPDATE models SET used = ? WHERE id = ?", (now, row["model"]))
    elif row["kind"] == SAMPLE:
        use_sampler(db, row["owner"], now)
    changes = finished.changes
    if row["kind"] in CREATION and isinstance(outcome, Failure):
        failed = ModelChange(model_id(row["owner"], row["seq"]), state="failed")
        changes = replace(changes, models=(*changes.models, failed))
    return [finished.request_id, *apply(store, db, changes, now)]


def is_unstarted_sample(db: sqlite3.Connection, request_id: str, key: str) -> bool:
    """Return whether this is a sample of this key that nothing has begun to draw."""
    row = db.execute(
        "SELECT 1 FROM calls WHERE request_id = ? AND key = ? AND kind = ?"
        " AND done IS NULL AND attempts = 0",
        (request_id, key, SAMPLE),
    ).fetchone()
    return row is not None


def model_id(session: str, seq: int) -> str:
    """Return the id of a session's model. The client computes the same id by itself."""
    return f"{session}:train:{seq}"


def sampler_id(session: str, seq: int) -> str:
    """Return the id of a session's sampling session."""
    return f"{session}:sample:{seq}"


def select_completed(db: sqlite3.Connection, request_ids: Sequence[str]) -> list[CompletedCall]:
    """Return a record of each of these calls that is done."""
    completed = []
    for request_id in request_ids:
        row = db.execute(
            "SELECT kind, succeeded, done - accepted AS seconds FROM calls WHERE request_id = ?"
            " AND done IS NOT NULL",
            (request_id,),
        ).fetchone()
        if row is not None:
            completed.append(
                CompletedCall(request_id, row["kind"], bool(row["succeeded"]), row["seconds"])
            )
    return completed


def over_attempt_limit(db: sqlite3.Connection) -> list[str]:
    """Return the calls during which the process ended too often."""
    rows = db.execute(
        "SELECT request_id FROM calls WHERE done IS NULL AND attempts >= ? ORDER BY number",
        (MAX_ATTEMPTS,),
    )
    return [row["request_id"] for row in rows]


def result(db: sqlite3.Connection, request_id: str) -> Result | None:
    """Return the state of a promise, or None if it is unknown or no longer known."""
    row = db.execute(
        "SELECT key, kind, done, dropped, succeeded, content, content_type, error, category"
        " FROM calls LEFT JOIN answers USING (number) WHERE request_id = ?",
        (request_id,),
    ).fetchone()
    if row is None:
        return None
    outcome: Outcome | Failure | None = None
    if row["done"] is not None and not row["dropped"]:
        if row["succeeded"]:
            outcome = Outcome(row["content"], row["content_type"])
        else:
            outcome = Failure(row["error"], row["category"])
    return Result(row["key"], row["kind"], outcome, bool(row["dropped"]))


def _call(row: sqlite3.Row) -> Call:
    fields = {name: row[name] for name in Call.__dataclass_fields__}
    return Call(**{**fields, "changes_state": bool(row["changes_state"])})
