"""Objects and helpers that all routes share."""

import asyncio
import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from megatron_vlm.serve.http.api_keys import ApiKeys
from megatron_vlm.serve.http.bodies import Bodies, Unreadable
from megatron_vlm.serve.http.prometheus import Metrics
from megatron_vlm.serve.http.request_limits import RequestLimits
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.http.schemas import JsonForm
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    Call,
    CompletedCall,
    Conflict,
    Promise,
    QuotaExceeded,
)

_BATCH = 256
T = TypeVar("T")
AForm = TypeVar("AForm", bound=JsonForm)


@dataclass(frozen=True)
class ServerFacts:
    """Facts about this server for its clients. The first of `base_models` is the name of its model;
    the others are accepted as aliases."""

    base_models: tuple[str, ...]
    max_context_length: int | None = None
    tokenizer_id: str | None = None
    arch: str | None = None
    version: str = ""
    public_url: str | None = None  # the address that clients use, if it is another
    layout: str = ""
    vocabulary: int | None = None  # number of tokens


@dataclass(frozen=True)
class AppContext:
    """State that all routes share: the journal, the keys and limits of clients, and the waiting
    requests."""

    journal: Journal
    limits: RequestLimits
    keys: ApiKeys | None
    facts: ServerFacts
    bodies: Bodies
    metrics: Metrics
    acceptor: "GroupCommit"
    waiters: "ResultWaiters"
    gauges: Mapping[str, float] = field(default_factory=dict)  # written by the engine

    async def form(self, request: Request, of: type[AForm]) -> AForm:
        """Read the body as this form. A 422 names the field that is wrong."""
        return self.read(await self.body(request), of)

    async def body(self, request: Request, limit: str = "form_bytes") -> bytes:
        """Read the body. A body above its limit raises HttpError 413."""
        try:
            return await self.bodies.read(request, limit)
        except Unreadable as error:
            raise HttpError(error.status, error.text) from error

    def read(self, body: bytes, of: type[AForm]) -> AForm:
        """Parse a body as this form."""
        try:
            return of.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise HttpError(422, complaints(error)) from error

    async def write(self, function: Callable[..., T], *values: Any) -> T:
        """Run a function of the journal in a thread, so that the event loop does not wait for the
        disk."""
        return await asyncio.to_thread(function, *values)

    async def promise(self, new: Call) -> str:
        """Write the call to the journal on the disk and return its request id. If there is no room
        at the moment, raise 429, after which a client retries silently."""
        promise = await self.acceptor.accept(new)
        if isinstance(promise, Conflict):
            raise HttpError(422, promise.text)  # A client would retry a 409.
        if isinstance(promise, QuotaExceeded):
            raise HttpError(429 if promise.passing else 422, promise.text)
        if promise.new:
            self.metrics.count_accepted(new.kind)
        return promise.request_id


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
        self._lock = threading.Lock()
        self._of: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._closed = False
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
            if value is None and not self._closed:
                await asyncio.wait([woken], timeout=seconds)
                value = there()
            return value
        finally:
            with self._lock:
                self._of[request_id].discard(woken)
                if not self._of[request_id]:
                    del self._of[request_id]

    def close(self) -> None:
        """Wake all waiting requests because the server stops."""
        self._closed = True
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
