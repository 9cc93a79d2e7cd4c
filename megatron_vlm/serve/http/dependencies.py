"""Dependencies of the routes: the key of a request, and access to the objects of that key."""

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from megatron_vlm.serve.http.api_keys import key_of
from megatron_vlm.serve.http.context import AppContext
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.journal.journal_records import (
    Model,
    NamedCheckpoint,
    SamplingSession,
    Session,
)


async def _context(request: Request) -> AppContext:
    return request.app.state.context


async def _key(request: Request) -> str:
    return key_of(request, request.app.state.context.keys)


Context = Annotated[AppContext, Depends(_context)]
Key = Annotated[str, Depends(_key)]
Answer = dict[str, Any]
T = TypeVar("T", Session, Model, SamplingSession, NamedCheckpoint)


def _owned(record: T | None, key: str, missing: str) -> T:
    """Return the record. One of another key raises 404, as a missing one does."""
    if record is None or record.key != key:
        raise HttpError(404, missing)
    return record


def require_session(context: AppContext, key: str, session: str) -> Session:
    missing = f"session_id: there is no session {session!r}; make a new client"
    return _owned(context.journal.session(session), key, missing)


def open_session(context: AppContext, key: str, session: str) -> Session:
    """Return a session that is not finished."""
    record = require_session(context, key, session)
    if record.finished is not None:
        raise HttpError(410, f"session_id: session {session} was finished; make a new client")
    return record


def require_model(context: AppContext, key: str, model: str, usable: bool = False) -> Model:
    record = _owned(context.journal.model(model), key, f"there is no model {model!r}")
    if usable and record.state in ("failed", "unloaded"):
        what = "could not be made" if record.state == "failed" else "was unloaded"
        raise HttpError(
            404, f"model {model} {what}; make another, from a checkpoint of it if need be"
        )
    return record


def require_sampler(context: AppContext, key: str, sampler: str) -> SamplingSession:
    missing = (
        f"there is no sampling session {sampler!r}, its session has ended, or its model has "
        "had newer snapshots for longer than limit snapshot_seconds; make it again"
    )
    return _owned(context.journal.sampler(sampler), key, missing)


def own_checkpoint(context: AppContext, key: str, path: str) -> NamedCheckpoint:
    missing = f"there is no checkpoint {path!r}, or it has expired"
    return _owned(context.journal.checkpoint(path), key, missing)


def moment(seconds: float) -> str:
    """Format a time for clients."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Any) -> dict[str, str]:
    """Convert the values of metadata to text, since clients refuse anything else."""
    return {str(name): v if isinstance(v, str) else str(v) for name, v in metadata.items()}
