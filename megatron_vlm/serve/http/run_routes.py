"""Routes of training runs, their checkpoints and downloads."""

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse

from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.context import (
    Answer,
    AppContext,
    Context,
    Key,
    moment,
    own_checkpoint,
    require_model,
    texts,
)
from megatron_vlm.serve.http.json_web_tokens import OWNER
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.http.session_routes import page_of
from megatron_vlm.serve.journal.journal_records import SEGMENTS, Model, NamedCheckpoint

router = APIRouter(prefix="/api/v1")
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
    form = await context.form(request, schemas.PathForm)
    checkpoint = own_checkpoint(context, key, form.tinker_path)
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
    """Return an address for each file. Everybody who knows it may use it until it expires."""
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
