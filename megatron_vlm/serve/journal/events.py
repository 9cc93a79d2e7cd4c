"""Events of checkpoints, for the audit log. Triggers write those that change the tables, so that no
change can be forgotten."""

import json
import sqlite3

from megatron_vlm.serve.journal.journal_records import NamedCheckpoint

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


def record_read(db: sqlite3.Connection, checkpoint: NamedCheckpoint, purpose: str) -> None:
    """Record that the owner of a checkpoint reads it."""
    details = {"model_id": checkpoint.model, "tinker_path": checkpoint.path, "purpose": purpose}
    event = checkpoint.key, "checkpoint_read", json.dumps(details)
    db.execute(f"INSERT INTO events VALUES ({NOW}, ?, ?, ?)", event)
