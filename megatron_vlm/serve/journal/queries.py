"""Queries of the tables of sessions, models, samplers and checkpoints."""

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal_records import (
    Model,
    NamedCheckpoint,
    SamplingSession,
    Session,
)


def read_sessions(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Session]:
    """Return sessions, newest first. `where` is SQL from this package, never from a client."""
    rows = _rows(db, "sessions", where, values)
    return [Session(**_fields(Session, row)) for row in rows]


def models(store: Store, db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Model]:
    """Return models, newest first."""
    rows = _rows(db, "models", where, values)
    return [
        Model(**_with_full_paths(store, _fields(Model, row), "folder", "source")) for row in rows
    ]


def samplers(
    store: Store, db: sqlite3.Connection, where: str, values: Sequence[Any]
) -> list[SamplingSession]:
    """Return sampling sessions that have not ended, newest first."""
    rows = _rows(db, "samplers", f"ended IS NULL AND {where}", values)
    return [
        SamplingSession(**_with_full_paths(store, _fields(SamplingSession, row), "folder"))
        for row in rows
    ]


def read_checkpoints(
    store: Store, db: sqlite3.Connection, where: str, values: Sequence[Any]
) -> list[NamedCheckpoint]:
    """Return checkpoints, newest first."""
    rows = _rows(db, "checkpoints", where, values)
    return [
        NamedCheckpoint(**_with_full_paths(store, _fields(NamedCheckpoint, row), "folder"))
        for row in rows
    ]


def _rows(
    db: sqlite3.Connection, table: str, where: str, values: Sequence[Any]
) -> list[sqlite3.Row]:
    return db.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY created DESC, rowid DESC", tuple(values)
    ).fetchall()


def _fields(of: type, row: sqlite3.Row) -> dict[str, Any]:
    names: Any = of.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: row[name] for name in names}
    for name in ("user_metadata", "facts", "figures"):
        if name in values:
            values[name] = json.loads(values[name])
    return values


def _with_full_paths(store: Store, fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**fields, **{name: store.folder(fields[name]) for name in names}}
