"""The journal of a service: the accepted calls, their order and their results.

    journal = Journal(run)
    while journal.wait(seconds=1.0):                       # the engine's thread
        for call in journal.next_calls():
            journal.begin_calls(call.request_id)
            outcome = do(call, journal.body(call.request_id))
            journal.finish(call.request_id, outcome, Changes(...))

Every method is one short transaction and may be called from any thread. Its changes have reached
the disk when it returns. After a crash the same calls are next, with `attempts` above 0.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_vlm.serve.journal import calls, queries
from megatron_vlm.serve.journal.accept import Bounds, accept, live_models
from megatron_vlm.serve.journal.attempts import Reads
from megatron_vlm.serve.journal.changes import put_sampler, record_checkpoint, release
from megatron_vlm.serve.journal.cleanup import JournalExpiry, folders, sweep
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.deferred_writes import DeferredWrites
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Accepted,
    Call,
    Changes,
    Conflict,
    Failure,
    Finished,
    Model,
    NamedCheckpoint,
    NewCall,
    NewSampler,
    Outcome,
    Promise,
    Result,
    SamplingSession,
    Saved,
    Session,
)
from megatron_vlm.serve.journal.notifier import Listener, Notifier

_POISON = Failure(
    f"the server ended {calls.MAX_ATTEMPTS} times while it did this call, and does not try again"
)


class Journal:
    """The journal RUN/journal.sqlite. Only one process at a time may open it."""

    def __init__(
        self, run: Path, bounds: Bounds = Bounds(), keep: JournalExpiry = JournalExpiry()
    ) -> None:
        self._store = Store(run)
        self._bell = Notifier()
        self._bounds, self._keep = bounds, keep
        self._touched = DeferredWrites()
        self.contradictions = 0  # calls whose number belongs to another call
        self.reads = Reads(self.run)
        self.begin_calls(*self.reads.interrupted_calls())
        self.reads.forget()
        self.finish_all([Finished(r, _POISON) for r in self._read(calls.over_attempt_limit)])
        self._bell.ring()

    @property
    def run(self) -> Path:
        """The folder of the run; all folders that the journal names are inside it."""
        return self._store.run

    # -- HTTP server: promises

    def accept(self, new: NewCall) -> Promise:
        """Promise that the call will be done once, however often it is sent."""
        return self.accept_all([new])[0]

    def accept_all(self, new: Sequence[NewCall]) -> list[Promise]:
        """Accept several calls in one transaction, which costs the disk as much as a single
        call."""
        with self._store.write() as db:
            promises = [accept(self._store, db, call, self._bounds) for call in new]
            new_ids = [p.request_id for p in promises if isinstance(p, Accepted) and p.new]
            completed = calls.select_completed(db, new_ids)
        self._bell.notify_completed(completed)
        self.contradictions += sum(isinstance(promise, Conflict) for promise in promises)
        self._bell.ring()
        return promises

    def result(self, request_id: str) -> Result | None:
        """Return the state of a promise, or None if it is unknown or no longer known."""
        return self._read(calls.result, request_id)

    def touch_result(self, request_id: str) -> None:
        """Record that the result was sent. It is kept for some minutes more."""
        self._touched.call(request_id)

    def listen(self, listener: Listener) -> None:
        """Register `listener`, which is called when there are results, in the thread that finished
        them."""
        self._bell.listen(listener)

    def cancel(self, request_id: str, key: str) -> bool:
        """Cancel a sample that was not started, and return whether it was still waiting."""
        with self._store.write() as db:
            row = db.execute(
                "SELECT 1 FROM calls WHERE request_id = ? AND key = ? AND kind = ?"
                " AND done IS NULL AND attempts = 0",
                (request_id, key, SAMPLE),
            ).fetchone()
            failure = Failure("the client cancelled it", "user")
            done = calls.finish_call(self._store, db, Finished(request_id, failure)) if row else []
            completed = calls.select_completed(db, done)
        self._bell.notify_completed(completed)
        return bool(done)

    def add_ringer(self, ringer: Callable[[], None]) -> None:
        """Register `ringer`, which is called in any thread when there may be a call to do."""
        self._bell.add_ringer(ringer)

    # -- the engine: calls

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for something new, and return whether there may be something."""
        return self._bell.wait(seconds)

    def ring(self) -> None:
        """Wake the waiting threads, for example to stop."""
        self._bell.ring()

    def next_calls(self, ahead: int = 1, of_key: int = 512, samples: bool = True) -> list[Call]:
        """Return all calls that may be done now, in the order in which they were accepted.

        For a model these are its next call, or its next `ahead` calls up to the first gap. They
        must still be done in the order of seq. Creations, samples and unloads wait for nothing. A
        call is listed until it is finished. A call with `attempts` above 0 had started when the
        process died. If it is done alone, no other call can fail with it.
        """
        with self._store.read() as db:
            return calls.next_calls(db, ahead, of_key, samples)

    def samples(self, after: int) -> list[Call]:
        """Return samples that are not done and were accepted after the call of this number."""
        return self._read(calls.samples, after)

    def body(self, request_id: str) -> bytes:
        """Return the decompressed body of a call: protobuf for forward_backward, otherwise JSON."""
        return self._read(calls.body, request_id)

    def begin_calls(self, *request_ids: str) -> list[str]:
        """Record that these calls are about to be done. Return those that still have to be; the
        others were cancelled. A call that starts three times and never finishes is not tried
        again."""
        with self._store.write(on_disk=False) as db:  # survives a crash of the process
            return calls.mark_started(db, request_ids)

    def undo_attempts(self, *request_ids: str) -> None:
        """Record that this process ends in good order without doing these calls, which it had
        started."""
        with self._store.write() as db:
            calls.undo_attempt(db, request_ids)

    def finish(
        self, request_id: str, outcome: Outcome | Failure, changes: Changes = Changes()
    ) -> bool:
        """Write the result of a call together with its changes. Return False, without any change,
        if the call already has a result. A creation that fails sets the state of its model. Calls
        that wait for a failed or unloaded model fail with it."""
        return self.finish_all([Finished(request_id, outcome, changes)])[0]

    def finish_all(self, finished: Sequence[Finished]) -> list[bool]:
        """Finish several calls in one transaction."""
        if not finished:
            return []
        with self._store.write() as db:
            done = [calls.finish_call(self._store, db, one) for one in finished]
            completed = calls.select_completed(
                db, [request_id for ids in done for request_id in ids]
            )
        self._bell.notify_completed(completed)
        self._bell.ring()
        return [bool(ids) for ids in done]

    def replay(self, model: str) -> list[Call]:
        """Return done calls that the model's durable state does not include, in order.
        (`Model.folder` includes the calls up to `Model.saved`.) Their results were already written:
        do them again, but do not finish them."""
        return self._read(calls.replay, model)

    def record_saved(self, model: str, seq: int, folder: Path) -> None:
        """Record a complete folder inside the run with the state of the model and its optimizer
        after call `seq`. The previous folder is removed when nothing else needs it. `Changes.saved`
        does the same together with a result."""
        with self._store.write() as db:
            record_checkpoint(self._store, db, Saved(model, seq, folder), time.time())

    # -- both: queries

    def models(self, key: str | None = None) -> list[Model]:
        """Return all models, or those of a key, newest first."""
        with self._store.read() as db:
            return queries.models(self._store, db, "coalesce(key = ?, 1)", (key,))

    def model(self, model: str) -> Model | None:
        """Return the model with this id."""
        with self._store.read() as db:
            return _first_or_none(queries.models(self._store, db, "id = ?", (model,)))

    def live_models(self) -> set[str]:
        """Return the ids of models whose client is active or waits for one of their calls."""
        with self._store.read() as db:
            return live_models(db, self._bounds)

    def samplers(self, key: str | None = None) -> list[SamplingSession]:
        """Return sampling sessions that have not ended, newest first, optionally those of a key."""
        with self._store.read() as db:
            return queries.samplers(self._store, db, "coalesce(key = ?, 1)", (key,))

    def sampler(self, sampler: str) -> SamplingSession | None:
        """Return the sampling session with this id, if it has not ended."""
        with self._store.read() as db:
            return _first_or_none(queries.samplers(self._store, db, "id = ?", (sampler,)))

    def checkpoints(
        self, key: str | None = None, model: str | None = None
    ) -> list[NamedCheckpoint]:
        """Return unexpired checkpoints, newest first, optionally only those of a key or of a
        model."""
        now = time.time()
        with self._store.read() as db:
            return queries.read_checkpoints(
                self._store,
                db,
                "coalesce(key = ?, 1) AND coalesce(model = ?, 1) AND coalesce(expires > ?, 1)",
                (key, model, now),
            )

    def checkpoint(self, path: str) -> NamedCheckpoint | None:
        """Return the checkpoint with this tinker path, if it has not expired."""
        with self._store.read() as db:
            where = "path = ? AND coalesce(expires > ?, 1)"
            return _first_or_none(
                queries.read_checkpoints(self._store, db, where, (path, time.time()))
            )

    def folders(self) -> set[Path]:
        """Return every folder that a row names."""
        with self._store.read() as db:
            return {self.run / name for name in folders(db)}

    def sessions(self, key: str | None = None) -> list[Session]:
        """Return all sessions, or those of a key, newest first."""
        with self._store.read() as db:
            return queries.read_sessions(db, "coalesce(key = ?, 1)", (key,))

    def session(self, session: str) -> Session | None:
        """Return the session with this id."""
        with self._store.read() as db:
            return _first_or_none(queries.read_sessions(db, "id = ?", (session,)))

    def active_sessions(self, key: str | None, seconds: float) -> int:
        """Count the sessions that are not finished and were active within the last `seconds`."""
        with self._store.read() as db:
            (count,) = db.execute(
                "SELECT count(*) FROM sessions WHERE coalesce(key = ?, 1) AND finished IS NULL"
                " AND heard > ?",
                (key, time.time() - seconds),
            ).fetchone()
        return count

    # -- HTTP server: everything else

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

    def delete_checkpoint(self, path: str) -> None:
        """Delete the row of a checkpoint. Its folder is removed when no model and no sampling
        session needs it."""
        with self._store.write() as db:
            release(db, time.time(), "SELECT folder FROM checkpoints WHERE path = ?", path)
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Set when the checkpoint expires; None means never."""
        with self._store.write() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def open_calls(self) -> list[Call]:
        """Return all calls that are not done, including those that wait for others."""
        return self._read(calls.select_open_calls)

    def sweep(self) -> None:
        """Remove what is no longer needed."""
        with self._store.write() as db:
            self._touched.write(db)
        self._bell.notify_completed(sweep(self._store, self._keep))
        self._bell.ring()

    def close(self) -> None:
        """Close the journal, so that another process may open it."""
        with suppress(sqlite3.Error), self._store.write() as db:  # the disk may be full
            self._touched.write(db)
        self._store.close()

    def _read(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._store.read() as db:
            return function(db, *values)


def _first_or_none(rows: list[Any]) -> Any:
    return rows[0] if rows else None
