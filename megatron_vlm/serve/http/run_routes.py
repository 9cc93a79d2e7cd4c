"""Routes of the server itself (its flags, health and capabilities), of sessions, and of training
runs with their checkpoints and downloads."""

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse

from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.api_keys import OWNER, looks_like_token, sent_key
from megatron_vlm.serve.http.context import (
    Answer,
    AppContext,
    Context,
    Key,
    moment,
    open_session,
    own_checkpoint,
    parsed_object,
    require_model,
    require_session,
    texts,
)
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.schemas import CreateSession, Finish
from megatron_vlm.serve.journal.journal_records import SEGMENTS, Model, NamedCheckpoint

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
    session = await context.field(request, "session_id")
    context.journal.touch_session(open_session(context, key, session).id)
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


downloads = APIRouter()
_RUN = "/training_runs/{run}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"


async def _checkpoint(
    run: str, kind: str, name: str, context: Context, key: Key
) -> NamedCheckpoint:
    return own_checkpoint(context, key, f"tinker://{run}/{kind}/{name}")


Checkpoint = Annotated[NamedCheckpoint, Depends(_checkpoint)]  # the one that the path names


@router.get("/training_runs")
async def training_runs(context: Context, key: Key, limit: int = 20, offset: int = 0) -> Answer:
    """List the training runs, newest first."""
    models, cursor = page_of(context.journal.models(key), limit, offset)
    return {"training_runs": [_run(context, model) for model in models], "cursor": cursor}


@router.get(_RUN)
async def training_run(run: str, context: Context, key: Key) -> Answer:
    """Return one training run."""
    return _run(context, require_model(context, key, run))


@router.get(_RUN + "/checkpoints")
async def checkpoints_of(run: str, context: Context, key: Key) -> Answer:
    """List the checkpoints of one training run."""
    require_model(context, key, run)
    return {"checkpoints": checkpoint_answers(context, context.journal.checkpoints(key, run))}


@router.get("/checkpoints")
async def checkpoints(context: Context, key: Key, limit: int = 100, offset: int = 0) -> Answer:
    """List the checkpoints of all training runs."""
    records, cursor = page_of(context.journal.checkpoints(key), limit, offset)
    return {"checkpoints": checkpoint_answers(context, records), "cursor": cursor}


@router.post("/weights_info")
async def weights_info(request: Request, context: Context, key: Key) -> Answer:
    """Return the facts that a client needs to load a checkpoint."""
    path = await context.field(request, "tinker_path", schemas.Text)
    checkpoint = own_checkpoint(context, key, path)
    model = require_model(context, key, checkpoint.model)
    lora = {name: model.facts.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return {
        "base_model": model.base_model,
        "is_lora": model.lora_rank > 0,
        "lora_rank": model.lora_rank or None,
        "optimizer_config": {"type": "adamw"},
        **lora,
    }


@router.delete(_CHECKPOINT)
async def delete(checkpoint: Checkpoint, context: Context) -> Answer:
    """Delete a checkpoint. Its folder is removed when no model and no sampling session needs it."""
    await context.write(context.journal.delete_checkpoint, checkpoint.path)
    return {"status": "deleted"}


@router.put(_CHECKPOINT + "/ttl")
async def ttl(checkpoint: Checkpoint, request: Request, context: Context) -> Answer:
    """Set when a checkpoint expires."""
    form = await context.form(request, schemas.Ttl)
    expires = None if form.ttl_seconds is None else time.time() + form.ttl_seconds
    await context.write(context.journal.set_expiry, checkpoint.path, expires)
    return {"status": "set"}


@router.post(_CHECKPOINT + "/publish")
@router.delete(_CHECKPOINT + "/publish")
async def publish(key: Key) -> Answer:
    """Refuse to publish a checkpoint, since this service has no public access."""
    raise HttpError(422, "publish: checkpoints of this service belong to the key that made them")


@router.get(_CHECKPOINT + "/external_weights_urls")
async def urls(checkpoint: Checkpoint, request: Request, context: Context) -> Answer:
    """Return an address for each file. Until it expires it works without a key."""
    if checkpoint.kind != "external":
        raise HttpError(
            422,
            f"{checkpoint.path} holds {SEGMENTS[checkpoint.kind]}, in a form of our own; "
            "save_weights_external makes a folder to download",
        )
    files = tuple(
        str(path.relative_to(checkpoint.folder))
        for path in sorted(checkpoint.folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    )
    await context.write(context.journal.record_read, checkpoint, "download")
    tickets: Tickets = request.app.state.tickets
    ticket, expires = tickets.give(checkpoint.folder, files, context.limits.url_seconds)
    base = (context.facts.public_url or str(request.base_url)).rstrip("/")
    return {
        "urls": {file: f"{base}/download/{ticket}/{quote(file)}" for file in files},
        "expires": moment(expires),
    }


@downloads.head("/download/{ticket}/{file:path}")
@downloads.get("/download/{ticket}/{file:path}")
async def download(ticket: str, file: str, request: Request) -> FileResponse:
    """Return a file of an exported folder."""
    tickets: Tickets = request.app.state.tickets
    path = tickets.path(ticket, file)
    if path is None or not path.is_file():
        raise HttpError(404, "no such file, or its address has expired: ask for another")
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


class Tickets:
    """Download addresses that nobody can guess and that expire. A restart ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Path, frozenset[str], float]] = {}

    def give(self, folder: Path, files: tuple[str, ...], seconds: float) -> tuple[str, float]:
        """Issue a ticket for these files, and return it with the time at which it expires."""
        now, ticket = time.time(), secrets.token_urlsafe(24)
        with self._lock:
            self._known = {name: t for name, t in self._known.items() if t[2] > now}
            self._known[ticket] = (folder, frozenset(files), now + seconds)
        return ticket, now + seconds

    def path(self, ticket: str, file: str) -> Path | None:
        """Return the path of a file, or None unless a valid ticket lists the file."""
        with self._lock:
            known = self._known.get(ticket)
        if known is None or known[2] <= time.time() or file not in known[1]:
            return None
        return known[0] / file


def _run(context: AppContext, model: Model) -> Answer:
    records = context.journal.checkpoints(model.key, model.id)
    last = {each.kind: _checkpoint_answer(each, model) for each in reversed(records)}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": OWNER + model.key,
        "is_lora": model.lora_rank > 0,
        "lora_rank": model.lora_rank or None,
        "corrupted": model.state == "failed",
        "last_request_time": moment(model.used),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": texts(model.user_metadata),
    }


def checkpoint_answers(context: AppContext, records: Sequence[NamedCheckpoint]) -> list[Answer]:
    """Return checkpoints as clients read them."""
    models = {model.id: model for model in context.journal.models()}
    return [_checkpoint_answer(each, models[each.model]) for each in records]


def _checkpoint_answer(checkpoint: NamedCheckpoint, model: Model) -> Answer:
    return {
        "base_model": model.base_model,
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": checkpoint.kind,
        "time": moment(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": texts(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires is None else moment(checkpoint.expires),
    }
