"""The journal of a service: the accepted calls, their order and their results.

    journal = Journal(run)
    while journal.wait(seconds=1.0):
        for call in journal.next_calls():
            journal.begin_calls(call.request_id)
            outcome = do(call, journal.body(call.request_id))
            journal.finish_all([Finished(call.request_id, outcome, Changes(...))])

Every method is one short transaction and may be called from any thread. Its changes have reached
the disk when it returns. After a crash the same calls are next, with `attempts` above 0.
"""

import json
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vlm.serve.journal.calls import (
    Bounds,
    accept,
    finish_call,
    insert_model,
    put_checkpoint,
    put_sampler,
    record_checkpoint,
    release,
    select_completed,
)
from megatron_vlm.serve.journal.cleanup import JournalExpiry, sweep
from megatron_vlm.serve.journal.database import NOW, Reads
from megatron_vlm.serve.journal.journal_reader import JournalReader
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Accepted,
    Call,
    CompletedCall,
    Conflict,
    Failure,
    Finished,
    Model,
    NamedCheckpoint,
    Promise,
    SamplingSession,
    Saved,
)
from megatron_vlm.serve.protocol.payloads import ForwardBackward
from megatron_vlm.serve.protocol.requests import read_forward_backward

MAX_ATTEMPTS = 3
MAX_PARSED_BYTES = 256 * 2**20  # maximum bytes of parsed bodies in memory
_POISON = Failure(
    f"the server ended {MAX_ATTEMPTS} times while it did this call, and does not try again"
)
Listener = Callable[[Sequence[CompletedCall]], None]


class Journal(JournalReader):
    """The journal RUN/journal.sqlite. Only one process at a time may open it."""

    def __init__(
        self, run: Path, bounds: Bounds = Bounds(), keep: JournalExpiry = JournalExpiry()
    ) -> None:
        super().__init__(run, bounds)
        self._keep = keep
        self._news = threading.Condition()
        self._is_rung = True
        self._listeners: list[Listener] = []
        # Facts that stay in memory until the next sweep. A crash loses them, and things are kept
        # longer.
        self._fetched: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._parsed: dict[str, ForwardBackward] = {}  # by request id
        self.contradictions = 0  # calls whose number belongs to another call
        self.reads = Reads(self.run)
        self.begin_calls(*self.reads.interrupted_calls())
        shutil.rmtree(self.reads.folder, ignore_errors=True)
        poison = self._calls("done IS NULL AND attempts >= ?", MAX_ATTEMPTS)
        self.finish_all([Finished(call.request_id, _POISON) for call in poison])

    # -- accepting calls

    def accept_all(self, new: Sequence[Call]) -> list[Promise]:
        """Promise that each call will be done once, however often it is sent. One transaction for
        several calls costs the disk as much as for a single one."""
        with self._store.write() as db:
            promises = [accept(self._store, db, call, self._bounds) for call in new]
            accepted = {
                promise.request_id: call
                for promise, call in zip(promises, new, strict=True)
                if isinstance(promise, Accepted) and promise.new
            }
            completed = select_completed(db, [*accepted])
        self._keep_parsed(accepted)
        self.contradictions += sum(isinstance(promise, Conflict) for promise in promises)
        self.ring(completed)
        return promises

    def _keep_parsed(self, accepted: Mapping[str, Call]) -> None:
        """Keep the parsed bodies of new calls, as far as there is room."""
        held = sum(each.size for each in list(self._parsed.values()))
        for request_id, call in accepted.items():
            if call.parsed and held + call.parsed.size <= MAX_PARSED_BYTES:
                self._parsed[request_id] = call.parsed
                held += call.parsed.size

    def forward_backward(self, request_id: str) -> ForwardBackward:
        """Return the request of a call, which is parsed again only after a restart, when it is done
        again, or where too many were waiting."""
        return self._parsed.get(request_id) or read_forward_backward(self.body(request_id))

    # -- waiting for calls and for results

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for something new, unless there was something since the last wait.
        Return whether there may be something."""
        with self._news:
            is_rung = self._news.wait_for(lambda: self._is_rung, seconds)
            self._is_rung = False
            return is_rung

    def listen(self, listener: Listener) -> None:
        """Register `listener`, which each ring calls, in the ringing thread, with the calls that
        were just completed. It must be quick and must not raise."""
        with self._news:
            self._listeners.append(listener)

    def ring(self, completed: Sequence[CompletedCall] = ()) -> None:
        """Wake the waiting threads, because there may be a call to do or another reason to look."""
        for call in completed:
            self._parsed.pop(call.request_id, None)
        with self._news:
            self._is_rung = True
            self._news.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(completed)

    # -- doing calls

    def begin_calls(self, *request_ids: str) -> list[str]:
        """Count an attempt of these calls, and return the calls that were not cancelled. A call
        that starts three times and never finishes is not tried again."""
        count = "UPDATE calls SET attempts = attempts + 1 WHERE request_id = ? AND done IS NULL"
        with self._store.write(on_disk=False) as db:  # survives a crash of the process
            return [name for name in request_ids if db.execute(count, (name,)).rowcount]

    def undo_attempts(self, *request_ids: str) -> None:
        """Uncount the attempt of calls that this process leaves unfinished on purpose."""
        undo = "UPDATE calls SET attempts = attempts - 1 WHERE request_id = ? AND done IS NULL"
        with self._store.write() as db:
            db.executemany(undo, [(name,) for name in request_ids])

    def finish_all(self, finished: Sequence[Finished]) -> list[bool]:
        """Write the results of calls together with their changes, in one transaction. Return for
        each whether it was written: a call that has a result keeps it, and changes nothing. A
        creation that fails sets the state of its model. Calls that wait for a failed or unloaded
        model fail with it."""
        if not finished:
            return []
        with self._store.write() as db:
            done = [finish_call(self._store, db, one) for one in finished]
            completed = select_completed(db, [request_id for ids in done for request_id in ids])
        self.ring(completed)
        return [bool(ids) for ids in done]

    def cancel(self, request_id: str, key: str) -> bool:
        """Cancel a sample that was not started, and return whether it was still waiting."""
        unstarted = (
            "SELECT 1 FROM calls WHERE request_id = ? AND key = ? AND kind = ? AND done IS NULL"
            " AND attempts = 0"
        )
        cancelled = Finished(request_id, Failure("the client cancelled it", "user"))
        completed = []
        with self._store.write() as db:
            if db.execute(unstarted, (request_id, key, SAMPLE)).fetchone():
                completed = select_completed(db, finish_call(self._store, db, cancelled))
        self.ring(completed)
        return bool(completed)

    def drop_sample(self, request_id: str, key: str) -> None:
        """Drop a sample that nobody will ask for: cancel it, and keep neither result nor row."""
        mine = "request_id = ? AND key = ? AND kind = ?"
        with self._store.write(on_disk=False) as db:
            row = db.execute(
                f"SELECT number, done FROM calls WHERE {mine}", (request_id, key, SAMPLE)
            ).fetchone()
            if row is None:
                return
            rung = []
            if row["done"] is None:
                cancelled = Finished(request_id, Failure("its client has gone", "user"))
                rung = select_completed(db, finish_call(self._store, db, cancelled))
            for table in ("answers", "calls"):
                db.execute(f"DELETE FROM {table} WHERE number = ?", (row["number"],))
        self.ring(rung)

    def end_sessions(self, display_name: str, reason: str) -> None:
        """Finish all sessions of this name, and drop their samples."""
        samples = self._select(
            "SELECT request_id, calls.key FROM calls JOIN samplers ON calls.owner = samplers.id"
            " JOIN sessions ON sessions.id = samplers.session WHERE display_name = ?",
            display_name,
        )
        for row in samples:
            self.drop_sample(row["request_id"], row["key"])
        with self._store.write() as db:
            named = "display_name = ? AND finished IS NULL"
            values = time.time(), reason, display_name
            db.execute(f"UPDATE sessions SET finished = ?, reason = ? WHERE {named}", values)

    def record_saved(self, model: str, seq: int, folder: Path) -> None:
        """Record a complete folder with the state of the model and its optimizer after call `seq`.
        The previous folder is removed when nothing else needs it. `Changes.saved` does the same
        together with a result."""
        with self._store.write() as db:
            record_checkpoint(self._store, db, Saved(model, seq, folder), time.time())

    # -- sessions, sampling sessions and checkpoints

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

    def finish_session(self, session: str, reason: str) -> None:
        """Finish a session whose client leaves. The first reason stays."""
        with self._store.write() as db:
            db.execute(
                "UPDATE sessions SET finished = ?, reason = ? WHERE id = ? AND finished IS NULL",
                (time.time(), reason, session),
            )

    def create_sampler(self, new: SamplingSession) -> None:
        """Create a sampling session once; a retry changes nothing."""
        with self._store.write() as db:
            put_sampler(self._store, db, new, time.time())

    def join_sampler(self, sampler: str) -> int:
        """Return a number from 1 for another client of this sampling session."""
        with self._store.write() as db:
            db.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            row = db.execute("SELECT clients FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return row["clients"]

    def store_run(self, run: Model, creation: bytes, checkpoint: NamedCheckpoint) -> bool:
        """Store a run that only has a checkpoint and cannot be trained. A retry with the same
        `creation` changes nothing. Return False if another run has the id. A session that does not
        exist is inserted as a finished one."""
        now = time.time()
        with self._store.write() as db:
            known = db.execute(
                "SELECT key, creation FROM models WHERE id = ?", (run.id,)
            ).fetchone()
            if known is not None:
                return (known["key"], known["creation"]) == (run.key, creation)
            db.execute(
                "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, 'success', '{}', NULL)",
                (run.session, run.key, now, now, now),
            )
            stored = replace(run, state="unloaded")
            insert_model(self._store, db, stored, ("store_run", creation), 0, now)
            put_checkpoint(self._store, db, checkpoint, now)
        return True

    def record_read(self, checkpoint: NamedCheckpoint, purpose: str) -> None:
        """Record for the audit log that the owner reads a checkpoint."""
        details = {"model_id": checkpoint.model, "tinker_path": checkpoint.path, "purpose": purpose}
        event = checkpoint.key, "checkpoint_read", json.dumps(details)
        with self._store.write(on_disk=False) as db:
            db.execute(f"INSERT INTO events VALUES ({NOW}, ?, ?, ?)", event)

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Set when the checkpoint expires; None means never."""
        with self._store.write() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def delete_checkpoint(self, path: str) -> None:
        """Delete the row of a checkpoint. Its folder goes when nothing else needs it."""
        with self._store.write() as db:
            release(db, time.time(), "SELECT folder FROM checkpoints WHERE path = ?", path)
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    # -- cleaning up

    def touch_result(self, request_id: str) -> None:
        """Record that the result was sent. It is kept for some minutes more."""
        with self._news:
            self._fetched.setdefault(request_id, time.time())

    def touch_session(self, session: str) -> None:
        """Record that the client of the session is active."""
        with self._news:
            self._heard[session] = time.time()

    def sweep(self) -> None:
        """Remove what is no longer needed."""
        self._write_touched()
        self.ring(sweep(self._store, self._keep))

    def close(self) -> None:
        """Close the journal, so that another process may open it."""
        with suppress(sqlite3.Error):  # the disk may be full
            self._write_touched()
        self._store.close()

    def _write_touched(self) -> None:
        with self._store.write() as db:
            with self._news:
                fetched, self._fetched = self._fetched, {}
                heard, self._heard = self._heard, {}
            db.executemany(
                "UPDATE calls SET fetched = coalesce(fetched, ?) WHERE request_id = ?",
                [(when, name) for name, when in fetched.items()],
            )
            db.executemany(
                "UPDATE sessions SET heard = ? WHERE id = ?",
                [(when, name) for name, when in heard.items()],
            )
