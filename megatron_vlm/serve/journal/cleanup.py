"""Clean-up of the journal. `sweep` is called every few seconds."""

import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.serve.journal.calls import apply, fail, release, select_completed
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Changes,
    CompletedCall,
    Failure,
    ModelChange,
)

_USED = (
    "SELECT folder FROM checkpoints UNION ALL SELECT folder FROM models WHERE folder IS NOT NULL"
    " UNION ALL SELECT source FROM models WHERE source IS NOT NULL"
    " UNION ALL SELECT folder FROM samplers WHERE ended IS NULL AND folder IS NOT NULL"
)


@dataclass(frozen=True)
class JournalExpiry:
    """Retention times in seconds."""

    fetched: float = 600.0  # a fetched result, since a client may request it again
    unfetched: float = 86400.0
    rows: float = 86400.0  # rows of samples without results, against late retries
    finished: float = 120.0  # models, samplers and waiting calls of a session that was finished
    silent: float = 86400.0  # samplers and waiting calls of a session that fell silent
    lost: float = 7 * 86400.0  # models of a session that fell silent
    events: float = 90 * 86400.0  # entries of the audit log
    released: float = 60.0  # a folder that nothing refers to
    # A snapshot of a model that has a newer one. The time counts from the newer snapshot and from
    # the last sample.
    superseded: float = 1800.0


def sweep(store: Store, keep: JournalExpiry) -> list[CompletedCall]:
    """Remove what has expired. Return the calls that fail because they wait for calls that nobody
    will send."""
    now = time.time()
    with store.write() as db:
        _drop_results(db, keep, now)
        release(db, now, "SELECT folder FROM checkpoints WHERE expires <= ?", now)
        db.execute("DELETE FROM checkpoints WHERE expires <= ?", (now,))
        db.execute("DELETE FROM events WHERE time < ?", (now - keep.events,))
        _end_superseded(db, now, now - keep.superseded)
        ended = select_completed(
            db, [*_end_sessions(db, keep, now), *_unload(store, db, keep, now)]
        )
        db.execute("PRAGMA incremental_vacuum(2000)").fetchall()
    _remove_released(store, now - keep.released)
    return ended


def _drop_results(db: sqlite3.Connection, keep: JournalExpiry, now: float) -> None:
    old = "done IS NOT NULL AND dropped = 0 AND (fetched < ? OR done < ?)"
    times = (now - keep.fetched, now - keep.unfetched)
    db.execute(f"DELETE FROM answers WHERE number IN (SELECT number FROM calls WHERE {old})", times)
    db.execute(f"UPDATE calls SET dropped = 1, error = NULL WHERE {old}", times)
    # The rows of a model stay because they define its order, and they are small.
    db.execute(
        f"DELETE FROM calls WHERE dropped = 1 AND kind = '{SAMPLE}' AND done < ?",
        (now - keep.rows,),
    )


def _end_sessions(db: sqlite3.Connection, keep: JournalExpiry, now: float) -> list[str]:
    over = "(SELECT id FROM sessions WHERE finished < ? OR heard < ?)"
    times = (now - keep.finished, now - keep.silent)
    unused = (
        f"ended IS NULL AND session IN {over} AND NOT EXISTS"
        " (SELECT 1 FROM calls WHERE calls.owner = samplers.id AND done IS NULL)"
    )
    release(db, now, f"SELECT folder FROM samplers WHERE {unused}", *times)
    db.execute(f"UPDATE samplers SET ended = {now!r} WHERE {unused}", times)
    waiting = db.execute(
        "SELECT request_id, seq, next_seq FROM calls JOIN models ON calls.model = models.id"
        f" WHERE done IS NULL AND session IN {over} AND NOT EXISTS (SELECT 1 FROM calls AS before"
        "  WHERE before.owner = models.id AND before.seq = models.next_seq)",
        times,
    ).fetchall()
    for row in waiting:
        text = (
            f"call {row['seq']} waited for call {row['next_seq']}, which was never sent before the "
            "session ended"
        )
        fail(db, row["request_id"], Failure(text, "user"), now)
    return [row["request_id"] for row in waiting]


def _end_superseded(db: sqlite3.Connection, now: float, before: float) -> None:
    """End the sampling sessions of a model's earlier weights once it has newer ones. A training
    loop creates one at each step and samples from the last. Sessions of named checkpoints stay."""
    old = (
        "SELECT id FROM (SELECT id, used, lead(created) OVER (PARTITION BY model ORDER BY created)"
        " AS newer FROM samplers WHERE ended IS NULL AND model IS NOT NULL AND path IS NULL)"
        " AS snapshots WHERE used < ? AND newer < ? AND NOT EXISTS"
        " (SELECT 1 FROM calls WHERE calls.owner = snapshots.id AND done IS NULL)"
    )
    for row in db.execute(old, (before, before)).fetchall():
        release(db, now, "SELECT folder FROM samplers WHERE id = ?", row["id"])
        db.execute("UPDATE samplers SET ended = ? WHERE id = ?", (now, row["id"]))


def _unload(store: Store, db: sqlite3.Connection, keep: JournalExpiry, now: float) -> list[str]:
    """Unload models whose client has gone, and return the calls that end. Checkpoints stay."""
    rows = db.execute(
        "SELECT id FROM models WHERE state = 'ready' AND session IN"
        " (SELECT id FROM sessions WHERE finished < ? OR heard < ?)"
        " AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.model = models.id AND done IS NULL)",
        (now - keep.finished, now - keep.lost),
    )
    gone = tuple(ModelChange(row["id"], state="unloaded") for row in rows.fetchall())
    return apply(store, db, Changes(models=gone), now)


def folders(db: sqlite3.Connection) -> list[str]:
    """Return all folders that something needs or that will be removed later."""
    return [row["folder"] for row in db.execute(f"{_USED} UNION ALL SELECT folder FROM released")]


def _remove_released(store: Store, before: float) -> None:
    """Remove released folders unless something refers to them or to a folder inside them. The row
    is deleted after the folder: after a crash in between, the next sweep removes the rest."""
    with store.write() as db:
        needed = [Path(row["folder"]) for row in db.execute(_USED)]
        rows = db.execute("SELECT folder FROM released WHERE since < ?", (before,)).fetchall()
    for row in rows:
        folder = store.run / row["folder"]
        if any(other.is_relative_to(row["folder"]) for other in needed):
            continue
        # The path may lead out of the run through a symbolic link; such a folder is left alone.
        if folder.resolve() != folder or not folder.is_relative_to(store.run):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            with store.write() as db:
                db.execute("DELETE FROM released WHERE folder = ?", (row["folder"],))
