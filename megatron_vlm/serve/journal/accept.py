"""Acceptance of calls into the journal: each call once, in the order of the numbers."""

import hashlib
import json
import logging
import re
import secrets
import sqlite3
import time
import uuid
from dataclasses import dataclass

from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    TRAINING,
    UNLOAD,
    Accepted,
    Call,
    Conflict,
    Failure,
    Model,
    Promise,
    QuotaExceeded,
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
        _insert_model(store, db, new, new.model, seed, now)
    return request_id


def failure_of_state(model: str, state: str) -> Failure | None:
    """Return the failure of all calls to a model in this state, or None if the model is usable."""
    what = {"failed": "could not be made", "unloaded": "was unloaded"}.get(state)
    return None if what is None else Failure(f"model {model} {what}", "user")


def _insert_model(
    store: Store, db: sqlite3.Connection, new: Call, model: Model, seed: int, now: float
) -> None:
    source = None if model.source is None else store.relative_folder(model.source)
    db.execute(
        "INSERT INTO models (id, session, key, created, used, state, base_model, lora_rank,"
        " user_metadata, creation_kind, creation, seed, source)"
        " VALUES (?, ?, ?, ?, ?, 'creating', ?, ?, ?, ?, ?, ?, ?)",
        (
            *(model.id, model.session, new.key, now, now, model.base_model, model.lora_rank),
            *(json.dumps(dict(model.user_metadata)), new.kind, new.body, seed, source),
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
