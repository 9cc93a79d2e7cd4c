"""What all routes share."""

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
    CompletedCall,
    Conflict,
    NewCall,
    Promise,
    QuotaExceeded,
)

_BATCH = 256
T = TypeVar("T")
AForm = TypeVar("AForm", bound=JsonForm)


@dataclass(frozen=True)
class ServerFacts:
    """What clients are told of this server. The first of `base_models` is its name; the others are
    taken for it as well."""

    base_models: tuple[str, ...]
    max_context_length: int | None = None
    tokenizer_id: str | None = None
    arch: str | None = None
    version: str = ""
    public_url: str | None = None  # where clients reach it, if its own address is not that
    layout: str = ""
    vocabulary: int | None = None  # tokens that there are


@dataclass(frozen=True)
class AppContext:
    """The journal, who may ask for how much, and who waits."""

    journal: Journal
    limits: RequestLimits
    keys: ApiKeys | None
    facts: ServerFacts
    bodies: Bodies
    metrics: Metrics
    acceptor: "GroupCommit"
    waiters: "ResultWaiters"
    gauges: Mapping[str, float] = field(default_factory=dict)  # of the engine

    async def form(self, request: Request, of: type[AForm]) -> AForm:
        """The body as this form; 422 names the field that is not as it should be."""
        return self.read(await self.body(request), of)

    async def body(self, request: Request, limit: str = "form_bytes") -> bytes:
        """The body; 413 where it is above a limit."""
        try:
            return await self.bodies.read(request, limit)
        except Unreadable as error:
            raise HttpError(error.status, error.text) from error

    def read(self, body: bytes, of: type[AForm]) -> AForm:
        """A body as a form."""
        try:
            return of.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise HttpError(422, complaints(error)) from error

    async def write(self, function: Callable[..., T], *values: Any) -> T:
        """Have the journal write beside the loop, which would wait for the disk."""
        return await asyncio.to_thread(function, *values)

    async def promise(self, new: NewCall) -> str:
        """The id of the promise, which is on the disk; 429, which a client sends again without a
        word, where there is no room for the moment."""
        given = await self.acceptor.accept(new)
        if isinstance(given, Conflict):
            raise HttpError(422, given.text)  # a 409 would be sent again
        if isinstance(given, QuotaExceeded):
            raise HttpError(429 if given.passing else 422, given.text)
        if given.new:
            self.metrics.accepted(new.kind)
        return given.request_id


class GroupCommit:
    """Accepts calls that arrive together in one transaction: the disk is waited for once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[tuple[NewCall, asyncio.Future[Promise]]] = []
        self._running: asyncio.Task[None] | None = None

    async def accept(self, new: NewCall) -> Promise:
        """What the journal says, once it is on the disk."""
        promise = asyncio.get_running_loop().create_future()
        self._waiting.append((new, promise))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await promise

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            try:
                given = await asyncio.to_thread(self._journal.accept_all, [new for new, _ in batch])
            except (sqlite3.Error, OSError) as error:
                for _, promise in batch:
                    if not promise.done():
                        promise.set_exception(error)
                continue
            for (_, promise), one in zip(batch, given, strict=True):
                if not promise.done():
                    promise.set_result(one)


class ResultWaiters:
    """Polls that wait for a promise; woken from the engine's thread."""

    def __init__(self, journal: Journal) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._closed = False
        journal.listen(self._kept)

    async def until(
        self, request_id: str, there: Callable[[], T | None], seconds: float
    ) -> T | None:
        """What `there` returns, as soon as that is not None; None after so many seconds."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._of[request_id].add(woken)
        try:
            found = there()
            if found is None and not self._closed:
                await asyncio.wait([woken], timeout=seconds)
                found = there()
            return found
        finally:
            with self._lock:
                self._of[request_id].discard(woken)
                if not self._of[request_id]:
                    del self._of[request_id]

    def close(self) -> None:
        """The server stops: nobody waits any longer."""
        self._closed = True
        with self._lock:
            woken = [future for futures in self._of.values() for future in futures]
        self._wake(woken)

    def _kept(self, promises: Sequence[CompletedCall]) -> None:
        with self._lock:
            woken = [f for kept in promises for f in self._of.get(kept.request_id, ())]
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
    """The fields that are wrong, and how."""
    found = []
    for one in error.errors(include_url=False, include_context=False)[:5]:
        where = ".".join(str(part) for part in one["loc"]) or "the body"
        what = one["msg"].removeprefix("Value error, ")
        # One of our errors names the field and its value itself.
        is_ours = what.startswith(f"{where}=")
        found.append(what if is_ours else f"{where}: {what}{_given(one['input'])}")
    return "; ".join(found)


def parsed_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or nothing where it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _given(value: Any) -> str:
    small = isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**64)
    if small or (isinstance(value, str) and len(value) <= 80):
        return f" (given: {value!r})"
    return ""
