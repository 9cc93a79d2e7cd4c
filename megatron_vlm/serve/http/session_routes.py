"""Routes of the server itself (its flags, health and capabilities) and of sessions."""

from typing import TypeVar

from fastapi import APIRouter, Request

from megatron_vlm.serve.http.api_keys import sent_key
from megatron_vlm.serve.http.context import (
    Answer,
    Context,
    Key,
    open_session,
    parsed_object,
    require_session,
    texts,
)
from megatron_vlm.serve.http.json_web_tokens import looks_like_token
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.http.schemas import CreateSession, Finish, SessionIdForm

router = APIRouter(prefix="/api/v1")
T = TypeVar("T")
ACTIVE_SECONDS = 600.0  # seconds since the last heartbeat; clients send one every 10


@router.post("/client/config")
async def client_config(request: Request, context: Context, key: Key) -> Answer:
    """Return every flag of the client, so that none follows a default that changes."""
    await context.body(request)
    return {
        "pjwt_auth_enabled": context.keys is not None,  # the client exchanges its key for a token
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_len": min(1024, context.limits.data),
        "fwdbwd_max_chunk_bytes_count": min(5_000_000, context.limits.body_bytes // 2),
        "sample_max_concurrent_requests": context.limits.client_samples,
        "sample_no_retries": False,
        "sample_enable_stuck_detection": True,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": False,
        "use_pyqwest_transport": True,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request, context: Context, key: Key) -> Answer:
    """Return the flags that clients request periodically."""
    await context.body(request)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.post("/auth/token")
async def auth_token(request: Request, context: Context, key: Key) -> Answer:
    """Return a token in place of the key, which must be the key itself: a token cannot renew
    itself."""
    await context.body(request)
    if context.keys is None:
        raise HttpError(422, "this server has no keys, and needs no token")
    if looks_like_token(sent_key(request)):
        raise HttpError(401, "send the API key, in place of a token")
    return {"jwt": context.keys.issue_token(key)}


@router.get("/healthz")
async def healthz() -> Answer:
    """Report that the server responds. This route needs no key."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(context: Context, key: Key) -> Answer:
    """Return the model of this server under each of its names."""
    facts = context.facts
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
async def telemetry(request: Request, context: Context, key: Key) -> Answer:
    """Accept telemetry and discard it."""
    await context.body(request)
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(request: Request, context: Context, key: Key) -> Answer:
    """Create a session for a client."""
    form = await context.form(request, CreateSession)
    active = context.journal.active_sessions(key, ACTIVE_SECONDS)
    if active >= context.limits.sessions:
        raise HttpError(
            422,
            f"{active} sessions are active, and limit sessions is {context.limits.sessions}: "
            "close() some, or wait; one that ended without it does not count after "
            f"{ACTIVE_SECONDS:g} s",
        )
    session = await context.write(
        context.journal.create_session, key, form.user_metadata or {}, form.display_name
    )
    return {"type": "create_session", "session_id": session}


@router.post("/session_heartbeat")
async def heartbeat(request: Request, context: Context, key: Key) -> Answer:
    """Record that a client is still active. A 410 ends its heartbeats."""
    form = await context.form(request, SessionIdForm)
    context.journal.touch_session(open_session(context, key, form.session_id).id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, request: Request, context: Context, key: Key) -> Answer:
    """Finish a session. Objects that only this session uses are released some minutes later."""
    body = await context.body(request)
    form = context.read(body, Finish)
    session = require_session(context, key, session_id)
    reason = str(form.reason.get("type", parsed_object(body).get("type", "")))[:100]
    await context.write(context.journal.finish_session, session.id, reason)
    return {"status": "finished"}


@router.get("/sessions")
async def sessions(context: Context, key: Key, limit: int = 20, offset: int = 0) -> Answer:
    """List session ids, newest first."""
    records, _ = page_of(context.journal.sessions(key), limit, offset)
    return {"sessions": [session.id for session in records]}


@router.get("/sessions/{session_id}")
async def session(session_id: str, context: Context, key: Key) -> Answer:
    """Return the training runs and sampling sessions that a session created."""
    record = require_session(context, key, session_id)
    models = [m.id for m in context.journal.models(key) if m.session == record.id]
    samplers = [s.id for s in context.journal.samplers(key) if s.session == record.id]
    return {
        "training_run_ids": models,
        "sampler_ids": samplers,
        "user_metadata": texts(record.user_metadata),
        "display_name": record.display_name,
    }


def page_of(records: list[T], limit: int, offset: int) -> tuple[list[T], Answer]:
    """Return a part of a list, and its cursor. A client's limit of 0 means the whole list, of which
    at most 1000 entries are returned."""
    if limit < 0 or offset < 0:
        raise HttpError(422, f"limit {limit}, offset {offset}: give numbers from 0")
    limit = min(limit or 1000, 1000)
    cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
    return records[offset : offset + limit], cursor
