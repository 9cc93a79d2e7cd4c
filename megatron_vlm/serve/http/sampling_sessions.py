"""Sampling sessions of the service's own, one for each key and model. The routes of chats draw in
them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import Request

from megatron_vlm.serve.http.chat_samples import DrawnAnswers
from megatron_vlm.serve.http.context import AppContext, ResultWaiters, own_checkpoint
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.sampling_routes import can_be_sampled, session_of_checkpoint
from megatron_vlm.serve.journal.journal_records import (
    Call,
    Failure,
    NamedCheckpoint,
    SamplingSession,
    path_of,
    plain_name,
    sampler_id,
)
from megatron_vlm.serve.protocol.answers import read_samples
from megatron_vlm.serve.protocol.payloads import RequestError, Samples

SESSION = "chat routes"  # display name of the sessions
IDLE_S = 3600.0  # a session ends after this time without a request
POLL_S = 1.0  # how often the connection of a waiting client is checked
_SamplerName: TypeAlias = tuple[str, str, Path | None]  # key, path and folder


@dataclass
class _Sampler:
    """A sampling session of the service's own, for one key and one model."""

    id: str
    session: str
    used: float = field(default_factory=time.monotonic)
    numbers: Any = field(default_factory=count)


class SamplePieces:
    """Tokens of streamed answers so far. The thread of the ranks or of the engine adds them. They
    are known by the numbers of their requests, since an engine tells of a request that has no id
    here yet."""

    def __init__(self, waiters: ResultWaiters) -> None:
        self._waiters, self._lock = waiters, threading.Lock()
        self._of: dict[tuple[str, int], list[list[int]]] = {}

    def expect(self, call: Call, answers: int) -> None:
        """Keep the tokens of this request from now on."""
        with self._lock:
            self._of.setdefault((call.owner, call.seq), [[] for _ in range(answers)])

    def add(self, call: Call, pieces: Sequence[Sequence[Any]]) -> None:
        """Add to each answer what follows its first tokens, of which there is a number. A request
        that is drawn again tells the same tokens again."""
        with self._lock:
            if (answers := self._of.get((call.owner, call.seq))) is None:
                return
            for answer, (start, ids) in zip(answers, pieces, strict=True):
                answer[start:] = ids if start <= len(answer) else []
        self._waiters.wake(call.request_id)

    def of(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the tokens of each answer. They are no copies, and may grow."""
        with self._lock:
            return self._of.get((call.owner, call.seq), ())

    def forget(self, call: Call) -> None:
        """Drop the tokens of a request that has ended."""
        with self._lock:
            self._of.pop((call.owner, call.seq), None)


class SamplingSessions:
    """The ChatSource of the service: the sampling sessions of all keys."""

    def __init__(self, context: AppContext) -> None:
        self.context, self.pieces = context, SamplePieces(context.waiters)
        self._samplers: dict[_SamplerName, _Sampler] = {}
        self._making = asyncio.Lock()

    async def place(self, key: str, model: str) -> tuple[str, int]:
        sampler = await self._sampler(key, model)
        return sampler.id, next(sampler.numbers)

    async def accept(self, call: Call, streamed: int) -> Call:
        if streamed:
            self.pieces.expect(call, streamed)
        try:
            request_id = await self.context.promise(call)
        except BaseException:
            self.pieces.forget(call)
            raise
        return replace(call, request_id=request_id, body=b"")

    async def drop(self, call: Call) -> None:
        self.pieces.forget(call)
        await self.context.write(self.context.journal.drop_sample, call.request_id, call.key)

    async def follow(
        self, request: Request, call: Call
    ) -> AsyncIterator[Samples | Sequence[Sequence[int]]]:
        waiters = self.context.waiters
        while (result := await waiters.result(call.request_id, POLL_S)) is None:
            if waiters.closed:
                raise HttpError(503, "the server stops")
            if await request.is_disconnected():
                raise HttpError(499, "the client has closed its connection")
            yield self.pieces.of(call)
        if result.outcome is None:
            raise HttpError(503, "the result is no longer kept")
        if isinstance(result.outcome, Failure):
            status = 400 if result.outcome.category == "user" else 500
            raise HttpError(status, result.outcome.text)
        yield read_samples(result.outcome.content)

    def drawn(self, key: str) -> DrawnAnswers:
        return ()

    def check_model(self, key: str, model: str) -> None:
        self._checkpoint(key, model)

    def models(self, key: str) -> dict[str, tuple[str, float]]:
        names = dict.fromkeys(self.context.facts.base_models, ("megatron_vlm", 0.0))
        return names | {
            checkpoint.path: (key, checkpoint.created)
            for checkpoint in self.context.journal.checkpoints(key)
            if can_be_sampled(self.context, checkpoint)
        }

    async def _sampler(self, key: str, model: str) -> _Sampler:
        """Return the sampling session of a model: the base model, or a checkpoint of this key."""
        path = self._path(model)
        checkpoint = self._checkpoint(key, model)
        async with self._making:
            await self._end_idle()
            # Another checkpoint may have been saved under the same name.
            name = key, path, None if checkpoint is None else checkpoint.folder
            sampler = self._samplers.get(name)
            if sampler is None or self.context.journal.sampler(sampler.id) is None:
                sampler = self._samplers[name] = await self._make(key, path, checkpoint)
        sampler.used = time.monotonic()
        return sampler

    def _path(self, model: str) -> str:
        """Return the name of a model, which may be given by its second name or after the base."""
        bases, name = self.context.facts.base_models, model.rpartition(";")[2]
        second = {plain_name(base): base for base in bases} | {base: base for base in bases}
        return second.get(name) or path_of(name)

    def _checkpoint(self, key: str, model: str) -> NamedCheckpoint | None:
        """Return the checkpoint that a model is, or None for the base model, or raise a 404."""
        facts, path = self.context.facts, self._path(model)
        if path in facts.base_models:
            return None
        try:
            if not path.startswith("tinker://"):
                names = " or ".join(facts.base_models)
                raise HttpError(
                    404,
                    f"there is no {model!r}: this server has {names}, and the "
                    "checkpoints of your key as tinker://...",
                )
            checkpoint = own_checkpoint(self.context, key, path)
        except HttpError as error:
            raise HttpError(
                404, f"model: {error.text}", param="model", code="model_not_found"
            ) from error
        if not can_be_sampled(self.context, checkpoint):
            raise RequestError(
                "was made to be downloaded",
                key="model",
                found=path,
                remedy="name a checkpoint in weights or sampler_weights",
            )
        return checkpoint

    async def _make(self, key: str, path: str, checkpoint: NamedCheckpoint | None) -> _Sampler:
        context = self.context
        session = await context.write(context.journal.create_session, key, {}, SESSION)
        sampler = _Sampler(sampler_id(session, 0), session)
        if checkpoint is None:
            new = SamplingSession(sampler.id, session, None, path)
        else:
            new = session_of_checkpoint(context, sampler.id, session, checkpoint)
        await context.write(context.journal.create_sampler, new)
        return sampler

    async def _end_idle(self) -> None:
        """Finish the sessions without a request for an hour, so that their weights can leave."""
        before = time.monotonic() - IDLE_S
        for name, sampler in list(self._samplers.items()):
            if sampler.used < before:
                del self._samplers[name]
                await self.context.write(
                    self.context.journal.finish_session, sampler.session, "idle"
                )
