"""Routes by which clients upload adapters in PEFT's form. An upload has a folder of its own and is
in memory alone, until its checkpoint is in the journal: a restart ends the others."""

import asyncio
import secrets
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import field_validator
from starlette.requests import ClientDisconnect

from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.serve.http.context import Answer, AppContext, Context, Key, moment
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.schemas import PARTS, JsonForm, LoraForm, Text, sdk_release
from megatron_vlm.serve.http.training_routes import check_base_model
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Model, NamedCheckpoint, model_id

router = APIRouter(prefix="/api/v1")
files = APIRouter()
_FOLDER = "uploads"
_PLAIN_URLS = (0, 39)  # the only release of the client that reads addresses without headers


class UploadedAdapters(Protocol):
    """The checks of adapters, which know the model."""

    def file_limits(self, lora: LoraForm) -> Mapping[str, int]: ...
    def settings(self, folder: Path, lora: LoraForm) -> dict[str, Any]: ...


class UploadStart(JsonForm):
    """Body of external_weights_upload_start. `destination_project_id` is ignored."""

    base_model: Text
    lora_config: LoraForm

    @field_validator("lora_config")
    @classmethod
    def _adapter(cls, value: LoraForm) -> LoraForm:
        if not value.rank or not value.targets:
            raise ValueError(
                f"give the adapter's rank, and those of {', '.join(PARTS)} that it has"
            )
        return value


@dataclass(eq=False)
class AdapterUpload:
    """Adapter upload in progress. Its id is the permission to send each file once."""

    key: str
    base_model: str
    lora: LoraForm
    folder: Path
    limits: Mapping[str, int]  # {file: most bytes}
    expires: float
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    begun: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    path: str | None = None  # the tinker path, once it is finished
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is finished


class Uploads:
    """The uploads that have not expired."""

    def __init__(self, journal: Journal, adapters: UploadedAdapters) -> None:
        self.adapters = adapters
        self._folder = journal.run / _FOLDER
        self._known: dict[str, AdapterUpload] = {}
        kept = journal.folders()
        for folder in set(self._folder.glob("*")) - kept:  # uploads that were not finished
            shutil.rmtree(folder, ignore_errors=True)

    def start(
        self, key: str, form: UploadStart, limits: Mapping[str, int], end: float
    ) -> AdapterUpload:
        """Start an upload with an empty folder."""
        folder = self._folder / uuid.uuid4().hex
        folder.mkdir(parents=True)
        new = AdapterUpload(key, form.base_model, form.lora_config, folder, limits, end)
        self._known[new.id] = new
        return new

    def open(self, key: str | None = None) -> int:
        """Count the uploads of a key that are not finished."""
        return sum(each.key == key and each.path is None for each in self._known.values())

    def find(self, upload: str) -> AdapterUpload:
        """Return an upload, or raise 404."""
        known = self._known.get(upload)
        if known is None or known.expires <= time.time():
            raise HttpError(404, "there is no such upload, or it has expired: start another")
        return known

    def drop(self, upload: AdapterUpload) -> None:
        """Forget an upload, with its files unless it is finished."""
        self._known.pop(upload.id, None)
        if upload.path is None:
            shutil.rmtree(upload.folder, ignore_errors=True)

    def sweep(self) -> None:
        """Drop the uploads that have expired."""
        now = time.time()
        for each in [each for each in self._known.values() if each.expires <= now]:
            if not each.lock.locked():
                self.drop(each)


@router.post("/external_weights_upload_start")
async def start(request: Request, context: Context, key: Key) -> Answer:
    """Start an upload, and return an address for each of its files."""
    form = await context.form(request, UploadStart)
    check_base_model(context, form.base_model)
    uploads = _uploads(request)
    if uploads.open(key) >= context.limits.models:
        raise HttpError(
            422,
            f"{uploads.open(key)} uploads are not finished, and limit models is "
            f"{context.limits.models}: finish some, or wait until they expire",
        )
    try:
        limits = uploads.adapters.file_limits(form.lora_config)
    except MegatronVLMError as error:
        raise HttpError(422, str(error)) from error
    upload = uploads.start(key, form, limits, time.time() + context.limits.url_seconds)
    base = (context.facts.public_url or str(request.base_url)).rstrip("/")
    urls: dict[str, Any] = {name: f"{base}/upload/{upload.id}/{quote(name)}" for name in limits}
    if sdk_release(request.headers.get("x-sdk-version", "")) != _PLAIN_URLS:
        urls = {name: {"url": url, "headers": {}} for name, url in urls.items()}
    return {"upload_id": upload.id, "urls": urls, "expires": moment(upload.expires)}


@files.put("/upload/{upload_id}/{name:path}")
async def put(upload_id: str, name: str, request: Request) -> Answer:
    """Receive a file of an upload, once."""
    upload = _uploads(request).find(upload_id)
    if name not in upload.limits:
        raise HttpError(404, f"{name[:100]!r}: an adapter has {' and '.join(upload.limits)}")
    if name in upload.begun:
        raise HttpError(422, f"{name} was sent before; start another upload to send another")
    upload.begun.add(name)
    try:
        async with asyncio.timeout(upload.expires - time.time()):
            await _receive(request, upload.folder / name, upload.limits[name])
    except (Exception, asyncio.CancelledError) as error:
        upload.begun.discard(name)  # it may be sent again
        (upload.folder / name).unlink(missing_ok=True)
        if isinstance(error, ClientDisconnect | TimeoutError):
            raise HttpError(400, f"{name} did not arrive before the upload expired") from error
        raise
    upload.received.add(name)
    return {"status": "received"}


@router.post("/external_weights_upload_finish")
async def finish_upload(request: Request, context: Context, key: Key) -> Answer:
    """Check the adapter, and return the path of its checkpoint. An upload that is refused ends."""
    uploads = _uploads(request)
    upload = uploads.find(await context.field(request, "upload_id"))
    if upload.key != key:
        raise HttpError(404, "there is no such upload, or it has expired: start another")
    async with upload.lock:
        if missing := sorted(upload.limits.keys() - upload.received):
            raise HttpError(422, f"upload_id: {' and '.join(missing)} has not arrived")
        if upload.path is None:
            try:
                settings = await asyncio.to_thread(
                    uploads.adapters.settings, upload.folder, upload.lora
                )
            except MegatronVLMError as error:
                uploads.drop(upload)
                raise HttpError(422, str(error)) from error
            upload.path = await _store(context, upload, settings)
    return {"tinker_path": upload.path}


async def _store(context: AppContext, upload: AdapterUpload, settings: dict[str, Any]) -> str:
    """Write the checkpoint to the journal, with a run of its own, and return its path."""
    session = str(uuid.uuid4())
    facts = {"form": settings, "moments": False}
    targets = {switch: part in settings["targets"] for switch, part in PARTS.items()}
    run = Model(
        id=model_id(session, 0),
        session=session,
        base_model=upload.base_model,
        lora_rank=upload.lora.rank,
        key=upload.key,
        facts=facts | targets,
    )
    size = sum(each.stat().st_size for each in upload.folder.iterdir())
    name = f"upload-{upload.folder.name[:8]}"
    checkpoint = NamedCheckpoint(run.id, "external", name, upload.folder, size, facts=facts)
    is_stored = await context.write(context.journal.store_run, run, b"", checkpoint)
    assert is_stored, f"{run.id} exists"
    return checkpoint.path


def _uploads(request: Request) -> Uploads:
    uploads: Uploads | None = getattr(request.app.state, "uploads", None)
    assert uploads is not None, "make_app was given no adapters"
    return uploads


async def _receive(request: Request, path: Path, limit: int) -> None:
    """Write the body to a file. A body above the limit is discarded, and raises HttpError 413."""
    size = 0
    with path.open("wb") as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                await asyncio.to_thread(file.write, chunk)
            elif size > 2 * limit:
                break
    if size > limit:
        raise HttpError(413, f"{path.name} has more than {limit} bytes, which such an adapter has")
