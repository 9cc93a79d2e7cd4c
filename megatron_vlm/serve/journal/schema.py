"""The tables of the journal."""

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
