"""What the files of routes begin with: whose request it is, and what is theirs."""

from datetime import UTC, datetime
from typing import Annotated, Any

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


async def _desk(request: Request) -> AppContext:
    return request.app.state.desk


async def _key(request: Request) -> str:
    return key_of(request, request.app.state.desk.keys)


Context = Annotated[AppContext, Depends(_desk)]
Key = Annotated[str, Depends(_key)]
Answer = dict[str, Any]


def own_session(desk: AppContext, key: str, session: str) -> Session:
    """The session; 404 where it is another's, as where there is none."""
    found = desk.journal.session(session)
    if found is None or found.key != key:
        raise HttpError(404, f"session_id: there is no session {session!r}; make a new client")
    return found


def open_session(desk: AppContext, key: str, session: str) -> Session:
    """A session that was not finished."""
    found = own_session(desk, key, session)
    if found.finished is not None:
        raise HttpError(410, f"session_id: session {session} was finished; make a new client")
    return found


def own_model(desk: AppContext, key: str, model: str, usable: bool = False) -> Model:
    """The model; 404 where it is another's, as where there is none."""
    found = desk.journal.model(model)
    if found is None or found.key != key:
        raise HttpError(404, f"there is no model {model!r}")
    if usable and found.state in ("failed", "unloaded"):
        what = "could not be made" if found.state == "failed" else "was unloaded"
        raise HttpError(
            404, f"model {model} {what}; make another, from a checkpoint of it if need be"
        )
    return found


def own_sampler(desk: AppContext, key: str, sampler: str) -> SamplingSession:
    """The sampling session; 404 where it is another's, as where there is none."""
    found = desk.journal.sampler(sampler)
    if found is None or found.key != key:
        raise HttpError(
            404,
            f"there is no sampling session {sampler!r}, its session has ended, or its model has "
            "had newer snapshots for longer than limit snapshot_seconds; make it again",
        )
    return found


def own_checkpoint(desk: AppContext, key: str, path: str) -> NamedCheckpoint:
    """The checkpoint; 404 where it is another's, as where there is none."""
    found = desk.journal.checkpoint(path)
    if found is None or found.key != key:
        raise HttpError(404, f"there is no checkpoint {path!r}, or it has expired")
    return found


def moment(seconds: float) -> str:
    """A time as clients read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Any) -> dict[str, str]:
    """Metadata as clients read it: they refuse anything but text."""
    return {str(name): v if isinstance(v, str) else str(v) for name, v in metadata.items()}
