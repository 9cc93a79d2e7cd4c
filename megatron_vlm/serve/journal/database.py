"""SQLite file of the journal, with one writer and several readers. Triggers write the events of
checkpoints for the audit log, so that no change can be forgotten. `Reads` marks the
requests in reading, since reading one may end the process."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import try_lock


class Reads:
    """The folder RUN/reading, with a file for each call whose request is in reading."""

    def __init__(self, run: Path):
        self.folder = run / "reading"

    def interrupted_calls(self) -> list[str]:
        """Return the calls that were being read when the previous process died."""
        return sorted(path.name for path in self.folder.glob("*"))

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


NOW = "(julianday('now') - 2440587.5) * 86400.0"

EVENTS = f"""
CREATE TABLE IF NOT EXISTS events (
  time REAL NOT NULL, key TEXT NOT NULL, event TEXT NOT NULL, details TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS events_of_key ON events (key, time);
CREATE INDEX IF NOT EXISTS events_old ON events (time);
CREATE TRIGGER IF NOT EXISTS checkpoint_create AFTER INSERT ON checkpoints BEGIN
  INSERT INTO events VALUES ({NOW}, NEW.key, 'checkpoint_create', json_object(
    'model_id', NEW.model, 'tinker_path', NEW.path, 'size_bytes', NEW.size));
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_delete AFTER DELETE ON checkpoints BEGIN
  INSERT INTO events VALUES ({NOW}, OLD.key, 'checkpoint_delete', json_object(
    'model_id', OLD.model, 'tinker_path', OLD.path,
    'reason', CASE WHEN OLD.expires <= {NOW} THEN 'expired' ELSE 'deleted' END));
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_update AFTER UPDATE OF expires ON checkpoints BEGIN
  INSERT INTO events VALUES ({NOW}, NEW.key, 'checkpoint_update', json_object(
    'model_id', NEW.model, 'tinker_path', NEW.path, 'expires', NEW.expires));
END;
CREATE TRIGGER IF NOT EXISTS checkpoint_read AFTER INSERT ON samplers WHEN NEW.path NOT NULL BEGIN
  INSERT INTO events VALUES ({NOW}, NEW.key, 'checkpoint_read', json_object(
    'model_id', NEW.model, 'tinker_path', NEW.path, 'purpose', 'sample'));
END;
"""


FILE = "journal.sqlite"
_READERS = 4


class Store:
    """The database RUN/journal.sqlite. All folders that it names are inside the run."""

    def __init__(self, run: Path) -> None:
        self.run = run.resolve()
        self.run.mkdir(parents=True, exist_ok=True)
        _keep_private(self.run)
        self._held = _lock_journal(self.run)
        self._lock = threading.Lock()
        try:
            self._writer = _open(self.run / FILE)
            _prepare(self._writer, self.run / FILE)
            self._readers = [_open(self.run / FILE) for _ in range(_READERS)]
        except sqlite3.DatabaseError as error:
            os.close(self._held)
            raise ConfigError(
                f"cannot be used: {error}",
                place=str(self.run / FILE),
                remedy="restore it, or give another run folder",
            ) from error
        except BaseException:
            os.close(self._held)
            raise
        self._free = threading.Semaphore(_READERS)

    @contextlib.contextmanager
    def write(self, on_disk: bool = True) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which is rolled back after an error. Without `on_disk` it survives a
        crash of the process but not of the machine, and nobody waits for the disk."""
        with self._lock:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if on_disk else 'NORMAL'}")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Open a reader. It sees what was committed before and does not wait for the writer."""
        with self._free:
            reader = self._readers.pop()
            try:
                yield reader
            finally:
                self._readers.append(reader)

    def relative_folder(self, folder: Path) -> str:
        """Return the folder as the tables name it, relative to the run, which may be moved."""
        full = Path(os.path.normpath(self.run / folder))
        assert full.is_relative_to(self.run) and full != self.run, (
            f"{full} is not inside {self.run}"
        )
        return str(full.relative_to(self.run))

    def close(self) -> None:
        """Close the journal, so that another process may use it."""
        with self._lock:
            for connection in (*self._readers, self._writer):
                connection.close()
            os.close(self._held)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # effective only before any table
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _keep_private(run: Path) -> None:
    """Restrict the files to their owner, because they hold what clients send."""
    with contextlib.suppress(PermissionError):  # a writable folder of another user
        run.chmod(0o700)
    os.close(os.open(run / FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    for path in run.glob(f"{FILE}*"):  # SQLite gives its other files the mode of the first
        with contextlib.suppress(PermissionError):
            path.chmod(0o600)


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.executescript(
            f"BEGIN; {TABLES} {EVENTS} PRAGMA user_version = {VERSION}; COMMIT;"
        )
    elif version == VERSION:
        connection.executescript(f"BEGIN; {EVENTS} COMMIT;")  # a journal may be older than these
    else:
        raise ConfigError(
            f"has version {version}, and this program reads version {VERSION}",
            place=str(path),
            remedy="start it with the program that wrote it, or give another run folder",
        )


def _lock_journal(run: Path) -> int:
    """Lock the journal, and return the handle of the lock, which ends with the process. Two servers
    with one journal would do each call twice."""
    handle = os.open(run / "journal.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not try_lock(handle):
        os.close(handle)
        raise ConfigError(
            ": another server uses this folder",
            key="run",
            found=str(run),
            remedy="stop it, or give another folder",
        )
    return handle


# The tables of the journal.

VERSION = 1

TABLES = """
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, heard REAL NOT NULL,
  finished REAL, reason TEXT, user_metadata TEXT NOT NULL, display_name TEXT
) STRICT;

CREATE TABLE models (
  id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions(id), key TEXT NOT NULL,
  created REAL NOT NULL, used REAL NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('creating', 'ready', 'failed', 'unloaded')),
  base_model TEXT NOT NULL, lora_rank INTEGER NOT NULL,
  user_metadata TEXT NOT NULL, facts TEXT NOT NULL DEFAULT '{}',
  figures TEXT NOT NULL DEFAULT '{}',
  creation_kind TEXT NOT NULL, creation BLOB NOT NULL, seed INTEGER NOT NULL, source TEXT,
  next_seq INTEGER NOT NULL DEFAULT 1, saved INTEGER NOT NULL DEFAULT 0, folder TEXT
) STRICT;
CREATE INDEX models_of_key ON models (key, state);

CREATE TABLE calls (
  number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, key TEXT NOT NULL,
  model TEXT, -- of an ordered call: the model whose calls are done in the order of seq
  size INTEGER NOT NULL, digest BLOB NOT NULL, changes_state INTEGER NOT NULL,
  seed INTEGER NOT NULL, accepted REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
  done REAL, succeeded INTEGER, fetched REAL, dropped INTEGER NOT NULL DEFAULT 0,
  content_type TEXT, error TEXT, category TEXT,
  UNIQUE (owner, seq)
) STRICT;
CREATE INDEX calls_waiting ON calls (key, size) WHERE done IS NULL;
CREATE INDEX calls_open ON calls (number) WHERE done IS NULL;
CREATE INDEX calls_kept ON calls (done) WHERE done IS NOT NULL AND dropped = 0;
CREATE INDEX samples_dropped ON calls (done) WHERE dropped = 1 AND kind = 'asample';
CREATE INDEX calls_to_replay ON calls (model, seq) WHERE changes_state = 1 AND succeeded = 1;

-- Large values by themselves: a row of calls is read without them.
CREATE TABLE bodies (
  number INTEGER PRIMARY KEY REFERENCES calls(number) ON DELETE CASCADE, body BLOB NOT NULL
) STRICT;
CREATE TABLE answers (
  number INTEGER PRIMARY KEY REFERENCES calls(number) ON DELETE CASCADE, content BLOB NOT NULL
) STRICT;

CREATE TABLE samplers (
  id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions(id), key TEXT NOT NULL,
  created REAL NOT NULL, used REAL NOT NULL, ended REAL, base_model TEXT NOT NULL, model TEXT,
  path TEXT, folder TEXT, facts TEXT NOT NULL DEFAULT '{}', clients INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE checkpoints (
  path TEXT PRIMARY KEY, model TEXT NOT NULL REFERENCES models(id), key TEXT NOT NULL,
  kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL, size INTEGER NOT NULL,
  created REAL NOT NULL, expires REAL, user_metadata TEXT NOT NULL, facts TEXT NOT NULL
) STRICT;
CREATE INDEX checkpoints_of_key ON checkpoints (key, created);
CREATE INDEX checkpoints_of_model ON checkpoints (model, created);

-- Folders that something let go of. One is removed when nothing else refers to it.
CREATE TABLE released (folder TEXT PRIMARY KEY, since REAL NOT NULL) STRICT;
"""
