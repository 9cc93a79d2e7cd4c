"""Calls in the journal: each is accepted once, in the order of the numbers. Its result changes the
tables of models, checkpoints and samplers."""

import hashlib
import json
import logging
import re
import secrets
import sqlite3
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    CREATION,
    SAMPLE,
    TRAINING,
    UNLOAD,
    Accepted,
    Call,
    Changes,
    CompletedCall,
    Conflict,
    Failure,
    Finished,
    Model,
    ModelChange,
    NamedCheckpoint,
    Promise,
    QuotaExceeded,
    SamplingSession,
    Saved,
    model_id,
)

SEED_BITS = 62
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^\s/:;,'\"()]+/)+")  # the folders of absolute paths
_log = logging.getLogger(__name__)
# Models whose client is active or has just requested something. All others are only on the disk.
# `at` is the time since which a client must have been active.
_LIVE = (
    "state IN ('creating', 'ready') AND finished IS NULL AND (heard > :at OR used > :at OR EXISTS"
    " (SELECT 1 FROM calls WHERE owner = models.id AND seq >= next_seq AND done IS NULL))"
)


@dataclass(frozen=True)
class Bounds:
    """Limits on what one key may have at a time."""

    open_calls: int = 4096
    open_bytes: int = 4 * 2**30
    models: int = 64  # models of recently active sessions
    silent_s: float = 120.0  # time without a heartbeat, which a client sends every 10 s


def accept(store: Store, db: sqlite3.Connection, new: Call, bounds: Bounds) -> Promise:
    """Accept a call within a transaction. A retry gets the promise of its original."""
    digest = hashlib.sha256(new.kind.encode() + b"\0" + new.body).digest()
    known = db.execute(
        "SELECT request_id, digest FROM calls WHERE owner = ? AND seq = ?", (new.owner, new.seq)
    ).fetchone()
    if known is not None and known["digest"] != digest and new.kind != UNLOAD:
        return Conflict(
            f"seq_id (model_seq_id of a new model): {new.seq} of {new.owner} was sent before, with "
            "another content; give each call a number of its own"
        )
    if known is not None:
        return Accepted(known["request_id"], new=False)
    full = _check_quota(db, new, bounds)
    return Accepted(_insert(store, db, new, digest)) if full is None else full


def _check_quota(db: sqlite3.Connection, new: Call, bounds: Bounds) -> QuotaExceeded | None:
    if new.failure is not None:
        return None
    if new.model is not None:
        models = len(live_models(db, bounds, new.key))
        if models >= bounds.models:
            return QuotaExceeded(
                f"{models} models of running clients are there, and limit models is "
                f"{bounds.models}: unload one, or end a client; models of one that ended without "
                f"close() do not count after {bounds.silent_s:g} s",
                passing=False,
            )
    calls, size = db.execute(
        "SELECT count(*), coalesce(sum(size), 0) FROM calls WHERE key = ? AND done IS NULL",
        (new.key,),
    ).fetchone()
    if calls < bounds.open_calls and size + len(new.body) <= bounds.open_bytes:
        return None
    if new.kind in TRAINING and _next_seq(db, new.owner) == new.seq:
        return None  # Other calls wait for this one; refusing it would block them for ever.
    if calls >= bounds.open_calls:
        return QuotaExceeded(
            f"{calls} calls are waiting, and limit open_calls is {bounds.open_calls}"
        )
    return QuotaExceeded(
        f"{size} bytes are waiting and {len(new.body)} were sent: limit open_bytes is "
        f"{bounds.open_bytes}"
    )


def live_models(db: sqlite3.Connection, bounds: Bounds, key: str | None = None) -> set[str]:
    """Return the models of a key, or of all keys, that a client may soon use."""
    rows = db.execute(
        "SELECT models.id FROM models JOIN sessions ON sessions.id = session"
        f" WHERE coalesce(models.key = :key, 1) AND {_LIVE}",
        {"key": key, "at": time.time() - bounds.silent_s},
    )
    return {row["id"] for row in rows}


def _insert(store: Store, db: sqlite3.Connection, new: Call, digest: bytes) -> str:
    now, seed = time.time(), secrets.randbits(SEED_BITS)
    request_id = f"{new.kind}-{uuid.uuid4().hex}"
    cursor = db.execute(
        "INSERT INTO calls (request_id, kind, owner, seq, key, model, size, digest, changes_state,"
        " seed, accepted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(request_id, new.kind, new.owner, new.seq, new.key),
            new.owner if new.kind in TRAINING else None,
            *(len(new.body), digest, new.changes_state, seed, now),
        ),
    )
    failure = new.failure
    if failure is None and new.kind in TRAINING:  # the model may have ended
        row = db.execute("SELECT state FROM models WHERE id = ?", (new.owner,)).fetchone()
        assert row is not None, f"model {new.owner} is not in the journal"
        failure = failure_of_state(new.owner, row["state"])
    if failure is not None:
        fail(db, request_id, failure, now)
        if new.kind in TRAINING:
            advance(db, new.owner)
        return request_id
    db.execute("INSERT INTO bodies VALUES (?, ?)", (cursor.lastrowid, new.body))
    if new.kind == SAMPLE:
        use_sampler(db, new.owner, now)
    if new.model is not None:
        creation = new.kind, new.body
        insert_model(store, db, replace(new.model, key=new.key), creation, seed, now)
    return request_id


def failure_of_state(model: str, state: str) -> Failure | None:
    """Return the failure of all calls to a model in this state, or None if the model is usable."""
    what = {"failed": "could not be made", "unloaded": "was unloaded"}.get(state)
    return None if what is None else Failure(f"model {model} {what}", "user")


def insert_model(
    store: Store,
    db: sqlite3.Connection,
    model: Model,
    creation: tuple[str, bytes],
    seed: int,
    now: float,
) -> None:
    """Insert a model with its key, state and facts. `creation`: kind and body of what made it."""
    source = None if model.source is None else store.relative_folder(model.source)
    db.execute(
        "INSERT INTO models (id, session, key, created, used, state, base_model, lora_rank,"
        " user_metadata, facts, creation_kind, creation, seed, source)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(model.id, model.session, model.key, now, now, model.state, model.base_model),
            *(model.lora_rank, json.dumps(dict(model.user_metadata))),
            *(json.dumps(dict(model.facts)), *creation, seed, source),
        ),
    )


def use_sampler(db: sqlite3.Connection, sampler: str, now: float) -> None:
    """Record that a sampling session has received a request or finished one."""
    db.execute("UPDATE samplers SET used = ? WHERE id = ?", (now, sampler))


def fail(db: sqlite3.Connection, request_id: str, failure: Failure, now: float) -> None:
    """Finish a call with a failure. Only the log shows the folders of the server."""
    text = failure.text
    if failure.category == "server" and (text := _FOLDERS.sub("", text)) != failure.text:
        _log.error("%s has failed: %s", request_id, failure.text)
    db.execute(
        "UPDATE calls SET done = ?, succeeded = 0, error = ?, category = ? WHERE request_id = ?",
        (now, text, failure.category, request_id),
    )


def advance(db: sqlite3.Connection, model: str) -> None:
    """Advance the model to its first call that is not done or has not arrived yet."""
    seq = _next_seq(db, model)
    assert seq is not None, f"model {model} is not in the journal"
    start = seq
    while db.execute(
        "SELECT 1 FROM calls WHERE owner = ? AND seq = ? AND done IS NOT NULL", (model, seq)
    ).fetchone():
        seq += 1
    if seq != start:
        db.execute("UPDATE models SET next_seq = ? WHERE id = ?", (seq, model))


def _next_seq(db: sqlite3.Connection, model: str) -> int | None:
    row = db.execute("SELECT next_seq FROM models WHERE id = ?", (model,)).fetchone()
    return None if row is None else row["next_seq"]


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
        put_checkpoint(store, db, checkpoint, now)
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


def put_checkpoint(store: Store, db: sqlite3.Connection, new: NamedCheckpoint, now: float) -> None:
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
