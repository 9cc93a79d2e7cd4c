"""The server itself: its flags, its health, what it can do; and sessions."""

from fastapi import APIRouter, Request

from megatron_vlm.serve.http.context import parsed_object
from megatron_vlm.serve.http.dependencies import (
    Answer,
    Context,
    Key,
    open_session,
    own_session,
    texts,
)
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.http.schemas import CreateSession, Finish, SessionIdForm

router = APIRouter(prefix="/api/v1")
_ACTIVE = 600.0  # seconds since a session was heard of; clients are heard of every 10


@router.post("/client/config")
async def client_config(request: Request, desk: Context, key: Key) -> Answer:
    """Every flag of the client, so that none follows a default that changes."""
    await desk.body(request)
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_len": min(1024, desk.limits.data),
        "fwdbwd_max_chunk_bytes_count": min(5_000_000, desk.limits.body_bytes // 2),
        "sample_max_concurrent_requests": desk.limits.client_samples,
        "sample_no_retries": False,
        "sample_enable_stuck_detection": True,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": False,
        "use_pyqwest_transport": True,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request, desk: Context, key: Key) -> Answer:
    """Flags that clients ask for again and again."""
    await desk.body(request)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz() -> Answer:
    """Whether the server answers. Needs no key."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(desk: Context, key: Key) -> Answer:
    """The model of this server, by the names that it is known by."""
    facts = desk.facts
    return {
        "supported_models": [
            {
                "model_name": name,
                "max_context_length": facts.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for name in facts.base_models
        ]
    }


@router.post("/telemetry")
async def telemetry(request: Request, desk: Context, key: Key) -> Answer:
    """Read and forgotten."""
    await desk.body(request)
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(request: Request, desk: Context, key: Key) -> Answer:
    """A client announces itself."""
    form = await desk.form(request, CreateSession)
    active = desk.journal.active_sessions(key, _ACTIVE)
    if active >= desk.limits.sessions:
        raise HttpError(
            422,
            f"{active} sessions are active, and limit sessions is {desk.limits.sessions}: close() "
            f"some, or wait; one that ended without it does not count after {_ACTIVE:g} s",
        )
    session = await desk.write(
        desk.journal.create_session, key, form.user_metadata or {}, form.display_name
    )
    return {"type": "create_session", "session_id": session}


@router.post("/session_heartbeat")
async def heartbeat(request: Request, desk: Context, key: Key) -> Answer:
    """It is still there. 410 ends its heartbeats."""
    form = await desk.form(request, SessionIdForm)
    desk.journal.heard(open_session(desk, key, form.session_id).id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, request: Request, desk: Context, key: Key) -> Answer:
    """It goes. What it made for itself alone is let go of some minutes later."""
    body = await desk.body(request)
    form = desk.read(body, Finish)
    session = own_session(desk, key, session_id)
    reason = str(form.reason.get("type", parsed_object(body).get("type", "")))[:100]
    await desk.write(desk.journal.finish_session, session.id, reason)
    return {"status": "finished"}


@router.get("/sessions")
async def sessions(desk: Context, key: Key, limit: int = 20, offset: int = 0) -> Answer:
    """Ids, newest first."""
    limit, offset = bounded_page(limit, offset)
    found = desk.journal.sessions(key)
    return {"sessions": [session.id for session in found[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def session(session_id: str, desk: Context, key: Key) -> Answer:
    """What it made."""
    found = own_session(desk, key, session_id)
    models = [m.id for m in desk.journal.models(key) if m.session == found.id]
    samplers = [s.id for s in desk.journal.samplers(key) if s.session == found.id]
    return {
        "training_run_ids": models,
        "sampler_ids": samplers,
        "user_metadata": texts(found.user_metadata),
        "display_name": found.display_name,
    }


def bounded_page(limit: int, offset: int) -> tuple[int, int]:
    """The part of a list that is asked for; a limit of 0 is all of it, as the client means it."""
    if limit < 0 or offset < 0:
        raise HttpError(422, f"limit {limit}, offset {offset}: give numbers from 0")
    return min(limit or 1000, 1000), offset
