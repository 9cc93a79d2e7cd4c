"""Results of calls, and the changes that they make in the tables of models, checkpoints and
samplers."""

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_vlm.serve.journal.accept import advance, fail, failure_of_state, use_sampler
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    CREATION,
    SAMPLE,
    Changes,
    CompletedCall,
    Failure,
    Finished,
    Model,
    ModelChange,
    NamedCheckpoint,
    SamplingSession,
    Saved,
    model_id,
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


def select_completed(db: sqlite3.Connection, request_ids: Sequence[str]) -> list[CompletedCall]:
    """Return a record of each of these calls that is done."""
    done = (
        "SELECT request_id, kind, succeeded, done - accepted AS seconds FROM calls"
        " WHERE request_id = ? AND done IS NOT NULL"
    )
    rows = [row for request_id in request_ids for row in db.execute(done, (request_id,))]
    return [CompletedCall(**{**row, "succeeded": bool(row["succeeded"])}) for row in rows]


def apply(store: Store, db: sqlite3.Connection, changes: Changes, now: float) -> list[str]:
    """Apply changes in the transaction of the result. Return the calls that end with a model."""
    request_ids = []
    for model in changes.models:
        _change_model(db, model)
        if model.state in ("failed", "unloaded"):
            request_ids += end_model(db, model.id, now)
    for checkpoint in changes.checkpoints:
        _put_checkpoint(store, db, checkpoint, now)
    for sampler in changes.samplers:
        put_sampler(store, db, sampler, now)
    for saved in changes.saved:
        record_checkpoint(store, db, saved, now)
    return request_ids


def end_model(db: sqlite3.Connection, model: str, now: float) -> list[str]:
    """Fail all waiting calls of a model that has failed or was unloaded, and return their ids. What
    the model would need to continue is released."""
    row = db.execute("SELECT state FROM models WHERE id = ?", (model,)).fetchone()
    failure = failure_of_state(model, row["state"])
    assert failure is not None, f"model {model} is {row['state']}"
    open_calls = "SELECT request_id FROM calls WHERE model = ? AND done IS NULL"
    waiting = [row["request_id"] for row in db.execute(open_calls, (model,))]
    for request_id in waiting:
        fail(db, request_id, failure, now)
    _release_state(db, now, model)
    db.execute("UPDATE models SET folder = NULL, source = NULL WHERE id = ?", (model,))
    db.execute(
        "DELETE FROM bodies WHERE number IN (SELECT number FROM calls WHERE model = ?)", (model,)
    )
    return waiting


def _change_model(db: sqlite3.Connection, change: ModelChange) -> None:
    facts, figures = (
        None if each is None else json.dumps(dict(each)) for each in (change.facts, change.figures)
    )
    db.execute(
        "UPDATE models SET state = coalesce(?, state), facts = coalesce(?, facts),"
        " figures = coalesce(?, figures) WHERE id = ?",
        (change.state, facts, figures, change.id),
    )


def _put_checkpoint(store: Store, db: sqlite3.Connection, new: NamedCheckpoint, now: float) -> None:
    path, folder = new.path, store.relative_folder(new.folder)
    release(db, now, "SELECT folder FROM checkpoints WHERE path = ?", path)
    cursor = db.execute(
        "INSERT OR REPLACE INTO checkpoints (path, model, key, kind, name, folder, size, created,"
        " expires, user_metadata, facts)"
        " SELECT ?, id, key, ?, ?, ?, ?, ?, ?, ?, ? FROM models WHERE id = ?",
        (
            *(path, new.kind, new.name, folder, new.size, now, new.expires),
            *(json.dumps(dict(new.user_metadata)), json.dumps(dict(new.facts)), new.model),
        ),
    )
    assert cursor.rowcount == 1, f"model {new.model} is not in the journal"


def store_run(
    store: Store, db: sqlite3.Connection, run: Model, creation: bytes, checkpoint: NamedCheckpoint
) -> bool:
    """Insert a run that cannot be trained, and its checkpoint, once. Return False if another run
    has the id. A session that does not exist is inserted as a finished one."""
    known = db.execute("SELECT key, creation FROM models WHERE id = ?", (run.id,)).fetchone()
    if known is not None:
        return (known["key"], known["creation"]) == (run.key, creation)
    now = time.time()
    db.execute(
        "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, 'success', '{}', NULL)",
        (run.session, run.key, now, now, now),
    )
    db.execute(
        "INSERT INTO models (id, session, key, created, used, state, base_model, lora_rank,"
        " user_metadata, facts, creation_kind, creation, seed)"
        " VALUES (?, ?, ?, ?, ?, 'unloaded', ?, ?, '{}', ?, 'store_run', ?, 0)",
        (
            *(run.id, run.session, run.key, now, now, run.base_model, run.lora_rank),
            *(json.dumps(dict(run.facts)), creation),
        ),
    )
    _put_checkpoint(store, db, checkpoint, now)
    return True


def put_sampler(store: Store, db: sqlite3.Connection, new: SamplingSession, now: float) -> None:
    """Insert a sampling session once; a retry changes nothing. It belongs to the key of its
    session."""
    db.execute(
        "INSERT OR IGNORE INTO samplers (id, session, key, created, used, base_model, model, path,"
        " folder, facts) SELECT ?, id, key, ?, ?, ?, ?, ?, ?, ? FROM sessions"
        " WHERE id = ?",
        (
            *(new.id, now, now, new.base_model, new.model, new.path),
            None if new.folder is None else store.relative_folder(new.folder),
            *(json.dumps(dict(new.facts)), new.session),
        ),
    )


def record_checkpoint(store: Store, db: sqlite3.Connection, saved: Saved, now: float) -> None:
    """Record the durable state of a model. Bodies of the calls that it includes are no longer
    needed."""
    folder = store.relative_folder(saved.folder)
    _release_state(db, now, saved.model)
    db.execute(
        "UPDATE models SET saved = ?, folder = ?, source = NULL WHERE id = ? AND saved <= ?",
        (saved.seq, folder, saved.model, saved.seq),
    )
    db.execute(
        "DELETE FROM bodies WHERE number IN (SELECT number FROM calls WHERE model = ?"
        " AND seq <= ? AND done IS NOT NULL)",
        (saved.model, saved.seq),
    )


def _release_state(db: sqlite3.Connection, now: float, model: str) -> None:
    for column in ("folder", "source"):
        release(db, now, f"SELECT {column} AS folder FROM models WHERE id = ?", model)


def release(db: sqlite3.Connection, now: float, select: str, *values: object) -> None:
    """Record that the folder which `select` returns may no longer be needed."""
    db.execute(
        f"INSERT OR REPLACE INTO released SELECT folder, ? FROM ({select})"
        " WHERE folder IS NOT NULL",
        (now, *values),
    )
