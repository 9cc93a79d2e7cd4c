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

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_vlm.serve.journal import calls
from megatron_vlm.serve.journal.accept import Bounds, accept, live_models
from megatron_vlm.serve.journal.changes import record_checkpoint
from megatron_vlm.serve.journal.cleanup import JournalExpiry, folders, sweep
from megatron_vlm.serve.journal.journal_records import (
    Accepted,
    Call,
    Changes,
    Conflict,
    Failure,
    Finished,
    NewCall,
    Outcome,
    Promise,
    Result,
    Saved,
)
from megatron_vlm.serve.journal.notifier import Listener, Notifier
from megatron_vlm.serve.journal.registry import Registry

_POISON = Failure(
    f"the server ended {calls.MAX_ATTEMPTS} times while it did this call, and does not try again"
)
FOLDER = "reading"


class Journal(Registry):
    """The journal RUN/journal.sqlite. Only one process at a time may open it."""

    def __init__(
        self, run: Path, bounds: Bounds = Bounds(), keep: JournalExpiry = JournalExpiry()
    ) -> None:
        super().__init__(run)
        self._notifier = Notifier()
        self._bounds, self._keep = bounds, keep
        self.contradictions = 0  # calls whose number belongs to another call
        self.reads = Reads(self.run)
        self.begin_calls(*self.reads.interrupted_calls())
        self.reads.forget()
        self.finish_all([Finished(r, _POISON) for r in self._read(calls.over_attempt_limit)])
        self._notifier.ring()

    # -- accepting calls

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
        self._notifier.notify_completed(completed)
        self.contradictions += sum(isinstance(promise, Conflict) for promise in promises)
        self._notifier.ring()
        return promises

    # -- waiting for calls

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for something new, and return whether there may be something."""
        return self._notifier.wait(seconds)

    def ring(self) -> None:
        """Wake the waiting threads, for example to stop."""
        self._notifier.ring()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called in any thread when there may be a call to do."""
        self._notifier.add_callback(callback)

    # -- calls that are not done

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

    def open_calls(self) -> list[Call]:
        """Return all calls that are not done, including those that wait for others."""
        return self._read(calls.select_open_calls)

    def body(self, request_id: str) -> bytes:
        """Return the decompressed body of a call: protobuf for forward_backward, otherwise JSON."""
        return self._read(calls.body, request_id)

    # -- doing calls

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
        self._notifier.notify_completed(completed)
        self._notifier.ring()
        return [bool(ids) for ids in done]

    def cancel(self, request_id: str, key: str) -> bool:
        """Cancel a sample that was not started, and return whether it was still waiting."""
        with self._store.write() as db:
            failure = Failure("the client cancelled it", "user")
            done = []
            if calls.is_unstarted_sample(db, request_id, key):
                done = calls.finish_call(self._store, db, Finished(request_id, failure))
            completed = calls.select_completed(db, done)
        self._notifier.notify_completed(completed)
        return bool(done)

    # -- results

    def listen(self, listener: Listener) -> None:
        """Register `listener`, which is called when there are results, in the thread that finished
        them."""
        self._notifier.listen(listener)

    def result(self, request_id: str) -> Result | None:
        """Return the state of a promise, or None if it is unknown or no longer known."""
        return self._read(calls.result, request_id)

    def touch_result(self, request_id: str) -> None:
        """Record that the result was sent. It is kept for some minutes more."""
        self._touched.call(request_id)

    # -- models after a restart

    def record_saved(self, model: str, seq: int, folder: Path) -> None:
        """Record a complete folder inside the run with the state of the model and its optimizer
        after call `seq`. The previous folder is removed when nothing else needs it. `Changes.saved`
        does the same together with a result."""
        with self._store.write() as db:
            record_checkpoint(self._store, db, Saved(model, seq, folder), time.time())

    def replay(self, model: str) -> list[Call]:
        """Return done calls that the model's durable state does not include, in order.
        (`Model.folder` includes the calls up to `Model.saved`.) Their results were already written:
        do them again, but do not finish them."""
        return self._read(calls.replay, model)

    # -- cleaning up

    def live_models(self) -> set[str]:
        """Return the ids of models whose client is active or waits for one of their calls."""
        with self._store.read() as db:
            return live_models(db, self._bounds)

    def folders(self) -> set[Path]:
        """Return every folder that a row names."""
        with self._store.read() as db:
            return {self.run / name for name in folders(db)}

    def sweep(self) -> None:
        """Remove what is no longer needed."""
        with self._store.write() as db:
            self._touched.write(db)
        self._notifier.notify_completed(sweep(self._store, self._keep))
        self._notifier.ring()

    def close(self) -> None:
        """Close the journal, so that another process may open it."""
        with suppress(sqlite3.Error), self._store.write() as db:  # the disk may be full
            self._touched.write(db)
        self._store.close()

    def _read(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._store.read() as db:
            return function(db, *values)


class Reads:
    """The folder RUN/reading."""

    def __init__(self, run: Path):
        self.folder = run / FOLDER

    def interrupted_calls(self) -> list[str]:
        """Return the calls that were being read when the previous process died."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir())

    def forget(self) -> None:
        """Remove all records."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def record_attempt(self, request_id: str) -> Iterator[None]:
        """Record that this call is being read. A full disk does not prevent the reading."""
        path = self.folder / request_id
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
