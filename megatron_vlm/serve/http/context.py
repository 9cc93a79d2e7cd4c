"""Objects and helpers that all routes share: what the routes of a request ask for by its key, and
the requests that wait for the journal."""

import asyncio
import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError

from megatron_vlm.serve.http.api_keys import ApiKeys, key_of
from megatron_vlm.serve.http.prometheus import Metrics
from megatron_vlm.serve.http.request_bodies import Bodies, HttpError, RequestLimits
from megatron_vlm.serve.http.schemas import Id, JsonForm, one_field
from megatron_vlm.serve.journal.calls import failure_of_state
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    Call,
    CompletedCall,
    Conflict,
    Model,
    NamedCheckpoint,
    Promise,
    QuotaExceeded,
    Result,
    SamplingSession,
    Session,
)

_BATCH = 256
T = TypeVar("T")
AForm = TypeVar("AForm", bound=JsonForm)
Record = TypeVar("Record", Session, Model, SamplingSession, NamedCheckpoint)


@dataclass(frozen=True)
class ServerFacts:
    """Facts about this server for its clients. All of `base_models` are names of its model."""

    base_models: tuple[str, ...]
    max_context_length: int
    tokenizer_id: str
    arch: str
    version: str
    public_url: str | None  # the address that clients use, if it is another
    layout: str
    vocabulary: int  # number of tokens
    has_grammars: bool = False  # answers can be held to a grammar
    has_penalties: bool = True  # the sampler takes min_p, penalties, logit_bias and min_tokens
    cuts_answers: bool = False  # a max_tokens beyond the room is no error


@dataclass(frozen=True)
class Front:
    """State that the routes of chats share, also in `rl`."""

    limits: RequestLimits
    keys: ApiKeys | None
    facts: ServerFacts
    bodies: Bodies

    async def body(self, request: Request, limit: str = "form_bytes") -> bytes:
        """Read the body. A body above its limit raises HttpError 413."""
        return await self.bodies.read(request, limit)

    def close(self) -> None:
        """Let go of the requests that wait, because the server stops."""


@dataclass(frozen=True)
class AppContext(Front):
    """State that all routes of the service share."""

    journal: Journal
    metrics: Metrics
    acceptor: "GroupCommit"
    waiters: "ResultWaiters"
    gauges: Mapping[str, float]  # written by the service

    async def form(self, request: Request, of: type[AForm]) -> AForm:
        """Read the body as this form. A 422 names the field that is wrong."""
        return self.read(await self.body(request), of)

    async def field(self, request: Request, name: str, kind: Any = Id) -> Any:
        """Read a body with one field, and return its value."""
        return getattr(await self.form(request, one_field(name, kind)), name)

    def close(self) -> None:
        self.waiters.close()

    def read(self, body: bytes, of: type[AForm]) -> AForm:
        """Parse a body as this form."""
        try:
            return of.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise HttpError(422, complaints(error)) from error

    async def write(self, function: Callable[..., T], *values: Any) -> T:
        """Run a function of the journal in a thread, since it waits for the disk."""
        return await asyncio.to_thread(function, *values)

    async def promise(self, new: Call) -> str:
        """Write the call to the journal on the disk and return its request id. After a 429
        (no room at the moment) a client retries silently."""
        promise = await self.acceptor.accept(new)
        if isinstance(promise, Conflict):
            raise HttpError(422, promise.text)  # A client would retry a 409.
        if isinstance(promise, QuotaExceeded):
            raise HttpError(429 if promise.passing else 422, promise.text)
        if promise.new:
            self.metrics.count_accepted(new.kind)
        return promise.request_id


async def _context(request: Request) -> AppContext:
    return request.app.state.context


async def request_key(request: Request) -> str:
    """Return the name of a request's key."""
    return key_of(request, request.app.state.context.keys)


Context = Annotated[AppContext, Depends(_context)]
AnyFront = Annotated[Front, Depends(_context)]
Key = Annotated[str, Depends(request_key)]
Answer = dict[str, Any]


def _owned(record: Record | None, key: str, missing: str) -> Record:
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
    failure = failure_of_state(model, record.state) if usable else None
    if failure is not None:
        raise HttpError(404, f"{failure.text}; make another, from a checkpoint of it if need be")
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


def is_adapter_file(context: AppContext, checkpoint: NamedCheckpoint) -> bool:
    """Return whether the checkpoint is an adapter in PEFT's form, which can be loaded."""
    model = context.journal.model(checkpoint.model)
    return checkpoint.kind == "external" and model is not None and model.lora_rank > 0


class GroupCommit:
    """A queue that accepts calls that arrive together in one transaction. They wait for the disk
    only once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[tuple[Call, asyncio.Future[Promise]]] = []
        self._running: asyncio.Task[None] | None = None

    async def accept(self, new: Call) -> Promise:
        """Queue a call and return the journal's reply once it is on the disk."""
        promise = asyncio.get_running_loop().create_future()
        self._waiting.append((new, promise))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await promise

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            try:
                replies = await asyncio.to_thread(
                    self._journal.accept_all, [new for new, _ in batch]
                )
            except (sqlite3.Error, OSError) as error:
                for _, promise in batch:
                    if not promise.done():
                        promise.set_exception(error)
                continue
            for (_, promise), reply in zip(batch, replies, strict=True):
                if not promise.done():
                    promise.set_result(reply)


class ResultWaiters:
    """Requests that wait for a result and are woken from the engine's thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._of: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.closed = False
        journal.listen(self._wake_waiters)

    async def wait_until(
        self, request_id: str, there: Callable[[], T | None], seconds: float
    ) -> T | None:
        """Return the value of `there` as soon as it is not None, or None after `seconds`."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._of[request_id].add(woken)
        try:
            value = there()
            if value is None and not self.closed:
                await asyncio.wait([woken], timeout=seconds)
                value = there()
            return value
        finally:
            with self._lock:
                self._of[request_id].discard(woken)
                if not self._of[request_id]:
                    del self._of[request_id]

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """Return the result of a call as soon as it is done or dropped, or None after `seconds`."""

        def done() -> Result | None:
            now = self._journal.result(request_id)
            return now if now is None or now.outcome or now.dropped else None

        return await self.wait_until(request_id, done, seconds)

    def wake(self, request_id: str) -> None:
        """Wake the requests that wait for this result, because there is news of it."""
        with self._lock:
            woken = list(self._of.get(request_id, ()))
        self._wake(woken)

    def close(self) -> None:
        """Wake all waiting requests because the server stops."""
        self.closed = True
        with self._lock:
            woken = [future for futures in self._of.values() for future in futures]
        self._wake(woken)

    def _wake_waiters(self, promises: Sequence[CompletedCall]) -> None:
        with self._lock:
            woken = [f for call in promises for f in self._of.get(call.request_id, ())]
        self._wake(woken)

    def _wake(self, woken: list[asyncio.Future[None]]) -> None:
        for future in woken:
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def complaints(error: ValidationError) -> str:
    """Describe the fields that are wrong."""
    descriptions = []
    for one in error.errors(include_url=False, include_context=False)[:5]:
        where = ".".join(str(part) for part in one["loc"]) or "the body"
        what = one["msg"].removeprefix("Value error, ")
        # The package's own errors name the field and its value themselves.
        has_field = what.startswith(f"{where}=")
        descriptions.append(what if has_field else f"{where}: {what}{_quote_value(one['input'])}")
    return "; ".join(descriptions)


def moment(seconds: float) -> str:
    """Format a time for clients."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Convert the values of metadata to text, since clients refuse anything else."""
    return {name: str(value) for name, value in metadata.items()}


def parsed_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, and return an empty one for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _quote_value(value: Any) -> str:
    small = isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**64)
    if small or (isinstance(value, str) and len(value) <= 80):
        return f" (given: {value!r})"
    return ""
