"""The journal of a service: what was promised, in which order, and what came of it.

    journal = Journal(run)
    while journal.wait(seconds=1.0):                       # the engine's thread
        for call in journal.next_calls():
            journal.begun(call.request_id)
            outcome = do(call, journal.body(call.request_id))
            journal.finish(call.request_id, outcome, Changes(...))

Every method is one short transaction, may be called from any thread, and has reached the disk when
it returns. After a crash the same calls are next, with `attempts` above 0.
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
from megatron_vlm.serve.journal.cleanup import RetentionPolicy, folders, sweep
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
    f"the server ended {calls.MOST_ATTEMPTS} times while it did this call, and does not try again"
)


class Journal:
    """RUN/journal.sqlite. One process at a time may open it."""

    def __init__(
        self, run: Path, bounds: Bounds = Bounds(), keep: RetentionPolicy = RetentionPolicy()
    ) -> None:
        self._store = Store(run)
        self._bell = Notifier()
        self._bounds, self._keep = bounds, keep
        self._touched = DeferredWrites()
        self.contradictions = 0  # calls whose number another has
        self.reads = Reads(self.run)
        self.begun(*self.reads.left())
        self.reads.forget()
        self.finish_all([Finished(r, _POISON) for r in self._read(calls.over_attempt_limit)])
        self._bell.ring()

    @property
    def run(self) -> Path:
        """The folder of the run; all folders that the journal names are inside it."""
        return self._store.run

    # -- the front: promises

    def accept(self, new: NewCall) -> Promise:
        """Promise that the call will be done, once, however often it is sent."""
        return self.accept_all([new])[0]

    def accept_all(self, new: Sequence[NewCall]) -> list[Promise]:
        """Several in one transaction, which costs the disk as much as one."""
        with self._store.write() as db:
            found = [accept(self._store, db, call, self._bounds) for call in new]
            new_ids = [p.request_id for p in found if isinstance(p, Accepted) and p.new]
            kept = calls.kept(db, new_ids)
        self._bell.kept(kept)
        self.contradictions += sum(isinstance(promise, Conflict) for promise in found)
        self._bell.ring()
        return found

    def result(self, request_id: str) -> Result | None:
        """What is known of a promise; None: nothing, or no longer."""
        return self._read(calls.result, request_id)

    def fetched(self, request_id: str) -> None:
        """Its result has been sent: it is kept some minutes more."""
        self._touched.call(request_id)

    def listen(self, listener: Listener) -> None:
        """Have `listener` called when results are there, in the thread that finished them."""
        self._bell.listen(listener)

    def cancel(self, request_id: str, key: str) -> bool:
        """A sample that was not begun need not be done. Whether it was still waiting."""
        with self._store.write() as db:
            row = db.execute(
                "SELECT 1 FROM calls WHERE request_id = ? AND key = ? AND kind = ?"
                " AND done IS NULL AND attempts = 0",
                (request_id, key, SAMPLE),
            ).fetchone()
            failure = Failure("the client cancelled it", "user")
            done = calls.finish_call(self._store, db, Finished(request_id, failure)) if row else []
            kept = calls.kept(db, done)
        self._bell.kept(kept)
        return bool(done)

    def when_rung(self, ringer: Callable[[], None]) -> None:
        """Have `ringer` called when there may be a call to do, in whatever thread."""
        self._bell.when_rung(ringer)

    # -- the engine: calls

    def wait(self, seconds: float | None = None) -> bool:
        """Until there may be something new, at most so long; whether there may be."""
        return self._bell.wait(seconds)

    def ring(self) -> None:
        """Wake who waits, for example to stop."""
        self._bell.ring()

    def next_calls(self, ahead: int = 1, of_key: int = 512, samples: bool = True) -> list[Call]:
        """All calls that may be done now, in the order in which they were accepted.

        Of a model these are the next one, or the next `ahead` where none is missing between them:
        they must be done in the order of seq all the same. Creations, samples and unloads wait for
        nothing. A call is listed until it is finished. One that has `attempts` above 0 was begun
        when the process died: done by itself it cannot take others along.
        """
        with self._store.read() as db:
            return calls.next_calls(db, ahead, of_key, samples)

    def samples(self, after: int) -> list[Call]:
        """Samples that are not done, of those that were accepted after the call of this number."""
        return self._read(calls.samples, after)

    def body(self, request_id: str) -> bytes:
        """What the client sent, unpacked: protobuf for forward_backward, else JSON."""
        return self._read(calls.body, request_id)

    def begun(self, *request_ids: str) -> list[str]:
        """Say that these are about to be done. Returns those that still have to be: others were
        cancelled. A call that is begun three times and never finished is not tried again."""
        with self._store.write(on_disk=False) as db:  # it is about processes that die
            return calls.mark_started(db, request_ids)

    def given_back(self, *request_ids: str) -> None:
        """These were begun and will not be done by this process, which ends in good order."""
        with self._store.write() as db:
            calls.undo_attempt(db, request_ids)

    def finish(
        self, request_id: str, outcome: Outcome | Failure, changes: Changes = Changes()
    ) -> bool:
        """The result of a call and what it changes, together. False, and nothing is changed, where
        it has one already. A creation that fails sets its model's state, and a model that is
        unloaded or failed takes the calls that wait for it along."""
        return self.finish_all([Finished(request_id, outcome, changes)])[0]

    def finish_all(self, finished: Sequence[Finished]) -> list[bool]:
        """Several in one transaction."""
        if not finished:
            return []
        with self._store.write() as db:
            done = [calls.finish_call(self._store, db, one) for one in finished]
            kept = calls.kept(db, [request_id for ids in done for request_id in ids])
        self._bell.kept(kept)
        self._bell.ring()
        return [bool(ids) for ids in done]

    def replay(self, model: str) -> list[Call]:
        """Calls that were done and answered and that the model's durable state (`Model.folder`,
        which holds those up to `Model.saved`) does not hold, in order. Done again they give no new
        result: do not finish them."""
        return self._read(calls.replay, model)

    def saved(self, model: str, seq: int, folder: Path) -> None:
        """The model's state after call `seq`, with the optimizer's, is in this folder, inside the
        run and complete. The folder before is removed when nothing else needs it. `Changes.saved`
        does the same together with a result."""
        with self._store.write() as db:
            record_checkpoint(self._store, db, Saved(model, seq, folder), time.time())

    # -- both: what there is

    def models(self, key: str | None = None) -> list[Model]:
        """All models, or those of a key; newest first."""
        with self._store.read() as db:
            return queries.models(self._store, db, "coalesce(key = ?, 1)", (key,))

    def model(self, model: str) -> Model | None:
        """One of them."""
        with self._store.read() as db:
            return _only(queries.models(self._store, db, "id = ?", (model,)))

    def live_models(self) -> set[str]:
        """Ids of models whose client is there, or waits for a call of them."""
        with self._store.read() as db:
            return live_models(db, self._bounds)

    def samplers(self, key: str | None = None) -> list[SamplingSession]:
        """All sampling sessions that have not ended; newest first."""
        with self._store.read() as db:
            return queries.samplers(self._store, db, "coalesce(key = ?, 1)", (key,))

    def sampler(self, sampler: str) -> SamplingSession | None:
        """One of them."""
        with self._store.read() as db:
            return _only(queries.samplers(self._store, db, "id = ?", (sampler,)))

    def checkpoints(
        self, key: str | None = None, model: str | None = None
    ) -> list[NamedCheckpoint]:
        """Checkpoints that are there, of a key, of a model; newest first."""
        now = time.time()
        with self._store.read() as db:
            return queries.read_checkpoints(
                self._store,
                db,
                "coalesce(key = ?, 1) AND coalesce(model = ?, 1) AND coalesce(expires > ?, 1)",
                (key, model, now),
            )

    def checkpoint(self, path: str) -> NamedCheckpoint | None:
        """The checkpoint with this tinker path."""
        with self._store.read() as db:
            where = "path = ? AND coalesce(expires > ?, 1)"
            return _only(queries.read_checkpoints(self._store, db, where, (path, time.time())))

    def folders(self) -> set[Path]:
        """Every folder that a row names."""
        with self._store.read() as db:
            return {self.run / name for name in folders(db)}

    def sessions(self, key: str | None = None) -> list[Session]:
        """All sessions, or those of a key; newest first."""
        with self._store.read() as db:
            return queries.read_sessions(db, "coalesce(key = ?, 1)", (key,))

    def session(self, session: str) -> Session | None:
        """One of them."""
        with self._store.read() as db:
            return _only(queries.read_sessions(db, "id = ?", (session,)))

    def active_sessions(self, key: str | None, seconds: float) -> int:
        """Sessions that were not finished and were heard of within so many seconds."""
        with self._store.read() as db:
            (count,) = db.execute(
                "SELECT count(*) FROM sessions WHERE coalesce(key = ?, 1) AND finished IS NULL"
                " AND heard > ?",
                (key, time.time() - seconds),
            ).fetchone()
        return count

    # -- the front: everything else

    def create_session(
        self, key: str, user_metadata: Mapping[str, Any], display_name: str | None
    ) -> str:
        """A new session; its id."""
        session, now = str(uuid.uuid4()), time.time()
        with self._store.write() as db:
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, NULL, NULL, ?, ?)",
                (session, key, now, now, json.dumps(dict(user_metadata)), display_name),
            )
        return session

    def heard(self, session: str) -> None:
        """Its client is there."""
        self._touched.session(session)

    def finish_session(self, session: str, reason: str) -> None:
        """Its client goes. The first reason stays."""
        with self._store.write() as db:
            db.execute(
                "UPDATE sessions SET finished = ?, reason = ? WHERE id = ? AND finished IS NULL",
                (time.time(), reason, session),
            )

    def create_sampler(self, new: NewSampler) -> None:
        """A sampling session of a checkpoint or of the base model; a retry changes nothing."""
        with self._store.write() as db:
            put_sampler(self._store, db, new, time.time())

    def join_sampler(self, sampler: str) -> int:
        """A number for another client of this sampling session, from 1."""
        with self._store.write() as db:
            db.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            row = db.execute("SELECT clients FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return row["clients"]

    def delete_checkpoint(self, path: str) -> None:
        """Forget it. Its folder goes when no model and no sampling session needs it."""
        with self._store.write() as db:
            release(db, time.time(), "SELECT folder FROM checkpoints WHERE path = ?", path)
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def set_expiry(self, path: str, expires: float | None) -> None:
        """When the checkpoint goes by itself; None: never."""
        with self._store.write() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def waiting(self) -> list[Call]:
        """All calls that are not done, also those that wait for others."""
        return self._read(calls.waiting)

    def sweep(self) -> None:
        """Let go of what is no longer needed."""
        with self._store.write() as db:
            self._touched.write(db)
        self._bell.kept(sweep(self._store, self._keep))
        self._bell.ring()

    def close(self) -> None:
        """Another process may open it now."""
        with suppress(sqlite3.Error), self._store.write() as db:  # the disk may be full
            self._touched.write(db)
        self._store.close()

    def _read(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._store.read() as db:
            return function(db, *values)


def _only(found: list[Any]) -> Any:
    return found[0] if found else None
