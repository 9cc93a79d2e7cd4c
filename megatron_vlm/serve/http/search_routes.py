"""Routes that search sessions and checkpoints, copy a checkpoint, and report what a key has stored
and done."""

import json
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import AliasChoices, AwareDatetime, Field, field_validator, model_validator

from megatron_vlm.serve.http.api_keys import OWNER
from megatron_vlm.serve.http.context import (
    Answer,
    Context,
    Key,
    moment,
    open_session,
    own_checkpoint,
    require_model,
    texts,
)
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.run_routes import ACTIVE_SECONDS, checkpoint_answers
from megatron_vlm.serve.http.schemas import FromZero, Id, JsonForm, Seconds, Text
from megatron_vlm.serve.journal.journal_records import (
    CheckpointKind,
    Model,
    NamedCheckpoint,
    Session,
    model_id,
)

router = APIRouter(prefix="/api/v1")
PROJECT = "default"  # the only project
_COPIES = uuid.UUID("5f0c1f5e-6f0b-4c1f-9a57-0f8a5f1c9e11")  # namespace of sessions of copies
_MAX_EVENTS = 10_000
_GIGABYTE = 10**9
_REASONS = ("success", "errored", "interrupted")
T = TypeVar("T", Session, NamedCheckpoint)


class Owner(JsonForm):
    """The owners to search. Keys see only their own things."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[tuple[Text, ...], Field(max_length=10)] = ()


class Cursor(JsonForm):
    """The last record of the previous page."""

    created: AwareDatetime = Field(alias="last_created_at")
    id: Text = Field(validation_alias=AliasChoices("last_session_id", "last_checkpoint_uuid"))


class SearchForm(JsonForm):
    """Fields of both searches."""

    project_ids: tuple[Text, ...] | None = None
    user_metadata: dict[Text, Text] | None = None
    owner: Owner = Owner()
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None

    @field_validator("project_ids")
    @classmethod
    def _one_project(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and set(value) != {PROJECT}:
            raise ValueError(f"this server has one project, {PROJECT}; leave it out")
        return value

    def page(
        self, key: str, records: Sequence[T], id_of: Callable[[T], str], id_name: str
    ) -> tuple[list[T], Answer | None]:
        """Return a page of a key's records, newest first, and the cursor of the next page."""

        def place(record: T) -> tuple[datetime, str]:
            return datetime.fromisoformat(moment(record.created)), id_of(record)

        is_own = self.owner.type != "user" or OWNER + key in self.owner.owner_urns
        wanted = (self.user_metadata or {}).items()
        found = [
            each
            for each in records
            if is_own
            and wanted <= texts(each.user_metadata).items()
            and (self.cursor is None or place(each) < (self.cursor.created, self.cursor.id))
        ]
        page = sorted(found, key=place, reverse=True)[: self.limit]
        if len(page) == len(found):
            return page, None
        return page, {"last_created_at": moment(page[-1].created), id_name: id_of(page[-1])}


class StatusQuery(JsonForm):
    """Session status to search for. No session here is ever failed or cancelled."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: tuple[Text, ...] | None = None


class SessionSearch(SearchForm):
    session_id: Text | None = None
    display_name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    statuses: Annotated[tuple[StatusQuery, ...], Field(min_length=1)] | None = None

    def finds(self, session: Session) -> bool:
        """Return whether a session has this id or name, and one of the statuses."""
        name, words = (session.display_name or "").lower(), (self.display_name or "").lower()
        matches = [self.session_id == session.id] * (self.session_id is not None)
        matches += [all(word in name for word in words.split())] * (self.display_name is not None)
        status = _status(session) or {}
        return (any(matches) or not matches) and (
            self.statuses is None
            or any(
                each.type == status.get("type")
                and (each.reasons is None or status["reason"]["type"] in each.reasons)
                for each in self.statuses
            )
        )


class CheckpointSearch(SearchForm):
    checkpoint_type: CheckpointKind | None = None
    base_models: tuple[Text, ...] | None = None


class CopyWeights(JsonForm):
    """Body of copy_weights. `destination_project_id` is ignored."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: FromZero | None = None
    ttl_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _both(self) -> "CopyWeights":
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("session_id, model_seq_id: give both, or neither for a new session")
        return self


@router.post("/sessions/search")
async def search_sessions(request: Request, context: Context, key: Key) -> Answer:
    """Return sessions of this key, newest first."""
    form = await context.form(request, SessionSearch)
    found = [each for each in context.journal.sessions(key) if form.finds(each)]
    page, cursor = form.page(key, found, lambda session: session.id, "last_session_id")
    checkpoints = context.journal.checkpoints(key)
    session_of = {model.id: model.session for model in context.journal.models(key)}
    summaries = []
    for session in page:
        sizes = [each.size for each in checkpoints if session_of[each.model] == session.id]
        summaries.append(
            {
                "session_id": session.id,
                "created_at": moment(session.created),
                "owner": OWNER + key,
                "project_id": PROJECT,
                "status": _status(session),
                "checkpoints_count": len(sizes),
                "checkpoint_storage_bytes": sum(sizes),
                "display_name": session.display_name,
                "user_metadata": texts(session.user_metadata),
            }
        )
    return {"sessions": summaries, "next_cursor": cursor}


@router.post("/checkpoints/search")
async def search_checkpoints(request: Request, context: Context, key: Key) -> Answer:
    """Return checkpoints of this key, newest first."""
    form = await context.form(request, CheckpointSearch)
    base_of = {model.id: model.base_model for model in context.journal.models(key)}
    found = [
        each
        for each in context.journal.checkpoints(key)
        if form.checkpoint_type in (None, each.kind)
        and (form.base_models is None or base_of[each.model] in form.base_models)
    ]
    page, cursor = form.page(key, found, lambda each: each.path, "last_checkpoint_uuid")
    return {"checkpoints": checkpoint_answers(context, page), "next_cursor": cursor}


@router.post("/copy_weights")
async def copy_weights(request: Request, context: Context, key: Key) -> Answer:
    """Copy a checkpoint to a new run, which cannot be trained. Both share the folder, which is
    removed after the last of them."""
    body = await context.body(request)
    form = context.read(body, CopyWeights)
    if request.headers.get("x-tinker-weights-access-token") is not None:
        raise HttpError(422, "weights_access_token: a key copies only checkpoints of its own")
    source = own_checkpoint(context, key, form.source_path)
    origin = require_model(context, key, source.model)
    # A client that sends the request again gets the copy that it has.
    retry = request.headers.get("x-idempotency-key") or uuid.uuid4().hex
    session = str(uuid.uuid5(_COPIES, json.dumps([key, retry])))
    if form.session_id is not None:
        session = open_session(context, key, form.session_id).id
    run = Model(
        id=model_id(session, form.model_seq_id or 0),
        session=session,
        base_model=origin.base_model,
        lora_rank=origin.lora_rank,
        key=key,
        facts=origin.facts,
    )
    expires = None if form.ttl_seconds is None else datetime.now(UTC).timestamp() + form.ttl_seconds
    copy = NamedCheckpoint(
        *(run.id, source.kind, source.name, source.folder, source.size, expires),
        *(source.user_metadata, source.facts),
    )
    if not await context.write(context.journal.store_run, run, body, copy):
        raise HttpError(
            422, f"model_seq_id: the session has another run {run.id}; give another number"
        )
    await context.write(context.journal.record_read, source, "copy")
    return {"tinker_path": copy.path}


@router.get("/billing/usage/checkpoints/current")
async def current_usage(context: Context, key: Key, project_id: str = PROJECT) -> Answer:
    """Return the number of this key's checkpoints and their bytes; bytes of copies count once."""
    if project_id != PROJECT:
        raise HttpError(422, f"project_id: this server has one project, {PROJECT}; leave it out")
    records = context.journal.checkpoints(key)
    size = sum({each.folder: each.size for each in records}.values())
    item = {
        "project_id": PROJECT,
        "org_user_urn": OWNER + key,
        "user_name": key,
        "checkpoint_count": len(records),
        "size_bytes": size,
        "size_gigabytes": size / _GIGABYTE,
    }
    return {"data": [item] if records else []}


@router.get("/audit")
async def audit(
    context: Context,
    key: Key,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
) -> Answer:
    """Return the events of this key, oldest first; `day` is one of UTC. Only checkpoints have
    events."""
    since, until = 0.0, float("inf")
    if day is not None:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since, until = start.timestamp(), start.timestamp() + timedelta(days=1).total_seconds()
    events = []
    if event_type in ("all", "checkpoints"):
        events = context.journal.events(key, since, until, _MAX_EVENTS)
    entries = [
        {
            "timestamp": moment(each.time),
            "event": each.event,
            "event_details": {"owner": OWNER + key, **each.details},
            **{name: each.details.get(name) for name in ("model_id", "tinker_path", "purpose")},
        }
        for each in events
    ]
    return {"entries": entries}


def _status(session: Session) -> Answer | None:
    if session.finished is not None:
        if session.reason not in _REASONS:
            return None
        return {"type": "client_finished", "reason": {"type": session.reason}}
    is_active = datetime.now(UTC).timestamp() - session.heard < ACTIVE_SECONDS
    return {"type": "active"} if is_active else None
