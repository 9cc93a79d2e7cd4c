"""Prompts and samples of chats, for OpenAI's and Anthropic's routes. The front process renders
chats. Each request of a client becomes one sampling request, with the same keys and limits."""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from fastapi import Request
from pydantic import ValidationError

from megatron_vlm.errors import DataError
from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.http.answer_grammar import (
    Grammar,
    check_grammar,
    forced_tools,
    whole_grammar,
)
from megatron_vlm.serve.http.context import AppContext, ResultWaiters, complaints, own_checkpoint
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.sampling_routes import (
    can_be_sampled,
    check_sample,
    session_of_checkpoint,
)
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Call,
    Failure,
    NamedCheckpoint,
    SamplingSession,
    path_of,
    plain_name,
    sampler_id,
)
from megatron_vlm.serve.protocol.answers import read_samples
from megatron_vlm.serve.protocol.chat_messages import Json, read_messages, text_length
from megatron_vlm.serve.protocol.payloads import RequestError, Samples

MAX_TOKEN_LENGTH = 16  # maximum characters of a token on average; usual text has about 4
T = TypeVar("T")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat."""

    chunks: list[dict[str, Any]]  # as a sampling request has them
    ids: list[int]  # with a placeholder for each part of a picture
    is_thinking: bool  # the answer begins inside a block of thoughts


class ChatTexts(Protocol):
    """The tokenizer and the chat template, for the routes of chats."""

    ends: tuple[str, ...]  # tokens that end an answer
    chat_format: ChatFormat
    has_switch: bool  # thinking can be switched off

    def convert_pictures(self, messages: Sequence[Mapping[str, Any]]) -> None: ...
    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> ChatPrompt: ...
    def encode(self, text: str) -> list[int]: ...
    def text(self, ids: Sequence[int]) -> str: ...
    def growing(self) -> Callable[[Sequence[int]], str]: ...
    def bytes_of(self, token: int) -> bytes: ...
    def call_rules(self, tools: Sequence[Mapping[str, Any]], is_single: bool) -> str: ...
    def thoughts_rule(self) -> str: ...


def too_long(longest: int, what: str, param: str) -> HttpError:
    """Return the error of a prompt for which the model has no room."""
    return HttpError(
        400,
        f"{param}: {what}, and the model takes {longest} tokens with the answer",
        param=param,
        code="context_length_exceeded",
    )


def _beyond_sampler(field: str, **found: Any) -> RequestError:
    return RequestError(
        "is not supported by the sampler of this server",
        key=field,
        **found,
        remedy="serve the model with engine.name=own or vllm, or leave it out",
    )


class ChatPrompts:
    """Maker of prompts. The tokenizer serves one thread at a time, and each key waits for it with
    one request at most, so that none keeps the others waiting."""

    def __init__(self, texts: ChatTexts, longest: int, max_pictures: int) -> None:
        self.texts, self.longest, self._max_pictures = texts, longest, max_pictures
        self._thread = ThreadPoolExecutor(1, "chat")
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key

    async def render(
        self,
        key: str,
        messages: Any,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        """Return the prompt of these messages, which are as a client sends them."""

        def read() -> list[Json]:
            chat = read_messages(messages, self._max_pictures)
            self._check_length([chat, tools, variables], "messages")
            self.texts.convert_pictures(chat)
            return chat

        async with self._turns[key]:
            chat = await asyncio.to_thread(read)
            try:
                return await self._in_thread(self.texts.prompt, chat, tools, variables)
            except DataError as error:
                if error.key != "data.max_tokens":  # set to what the model takes
                    raise
                raise too_long(self.longest, "the prompt has more tokens", "messages") from error

    async def encode(self, key: str, text: str) -> list[int]:
        """Return the tokens of a text."""
        self._check_length(text, "prompt")
        async with self._turns[key]:
            return await self._in_thread(self.texts.encode, text)

    async def check(self, key: str, grammar: Grammar) -> None:
        """Refuse a grammar that is wrong, or needs too much work."""
        async with self._turns[key]:
            await asyncio.to_thread(check_grammar, grammar)

    async def _in_thread(self, work: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)

    def _check_length(self, value: Any, param: str) -> None:
        """Refuse texts that are far too long, before they cost the time of a tokenizer."""
        if (length := text_length(value)) > MAX_TOKEN_LENGTH * self.longest:
            raise too_long(self.longest, f"the prompt has {length} characters", param)

    def no_thinking(self, is_off: bool) -> dict[str, bool]:
        """Return the variables of the chat template for a request that wants no thoughts. A
        template without a switch has none."""
        return {"enable_thinking": False} if is_off and self.texts.has_switch else {}


SESSION = "chat routes"  # display name of the sessions
IDLE_S = 3600.0  # a session ends after this time without a request
POLL_S = 1.0  # how often the connection of a waiting client is checked
_SamplerName: TypeAlias = tuple[str, str, Path | None]  # key, path and folder


@dataclass(frozen=True)
class SamplingFields:
    """Fields of a request that decide its samples, named as in asample."""

    num_samples: int = 1
    max_tokens: int | None = None  # None: as many as fit
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stops: tuple[str, ...] = ()  # in addition to the tokens that end an answer
    top_sample: int = 0
    prompt_log_probs: bool = False
    top_prompt: int = 0
    grammar: tuple[str, str] | None = None  # as in SamplingSettings
    penalties: Mapping[str, Any] = field(default_factory=dict)  # those that have an effect
    stream: bool = False


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


class ChatSamples:
    """The tokenizer, and the sampling sessions of all keys."""

    def __init__(self, context: AppContext, texts: ChatTexts, longest: int) -> None:
        """`longest`: maximum tokens of a prompt with its answer."""
        self.context, self.texts, self.longest = context, texts, longest
        self.pieces = SamplePieces(context.waiters)
        self.prompts = ChatPrompts(texts, longest, context.limits.pictures)
        self._samplers: dict[_SamplerName, _Sampler] = {}
        self._making = asyncio.Lock()

    async def hold(
        self,
        key: str,
        is_thinking: bool,
        grammar: Grammar | None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = "auto",
        is_single: bool = False,
    ) -> tuple[str, str] | None:
        """Return what an answer is held to, from its beginning: to a grammar, or to calls of the
        tools that must be called, or to either. `is_single`: to one call at most, as that of a
        named tool is."""
        forced = forced_tools(tool_choice, tools, is_single and grammar is None)
        if grammar is None and not forced:
            return None
        if not self.context.facts.has_grammars:
            raise _beyond_sampler(grammar.field if grammar else "tool_choice")
        is_named = isinstance(tool_choice, Mapping) and tool_choice["type"] in ("function", "tool")
        calls = self.texts.call_rules(forced or tools, is_single or is_named) if tools else None
        thoughts = self.texts.thoughts_rule() if is_thinking else None
        whole = whole_grammar(grammar, calls, bool(forced), thoughts)
        await self.prompts.check(key, whole)
        return whole.kind, whole.text

    async def begin(
        self,
        key: str,
        model: str,
        chunks: Sequence[Mapping[str, Any]],
        length: int,
        fields: SamplingFields,
    ) -> Call:
        """Queue the samples of a prompt of this length, and return the call with its id."""
        room = self.longest - length
        if room < 1 or (fields.max_tokens or 0) > room:
            asked = f"the prompt has {length} tokens and max_tokens is {fields.max_tokens}"
            raise too_long(self.longest, asked, "max_tokens")
        if fields.penalties and not self.context.facts.has_penalties:
            name, value = next(iter(fields.penalties.items()))
            raise _beyond_sampler(name, found=value)
        sampler = await self._sampler(key, model)
        ends = self.texts.ends if fields.stops else ()
        body = {
            "sampling_session_id": sampler.id,
            "seq_id": next(sampler.numbers),
            "prompt": {"chunks": list(chunks)},
            "num_samples": fields.num_samples,
            "sampling_params": {
                "max_tokens": fields.max_tokens or min(room, self.context.limits.max_tokens),
                "temperature": fields.temperature,
                "top_p": fields.top_p,
                "top_k": fields.top_k or -1,
                "seed": fields.seed,
                # The stops of an asample replace the tokens that end an answer.
                "stop": [*fields.stops, *ends] or None,
            },
            "topk_sample_logprobs": fields.top_sample,
            "prompt_logprobs": fields.prompt_log_probs,
            "topk_prompt_logprobs": fields.top_prompt,
            "stream_tokens": fields.stream,
            "grammar": fields.grammar,
            "penalties": fields.penalties,
        }
        content = await asyncio.to_thread(self._content, body, len(ends))
        call = Call(SAMPLE, sampler.id, body["seq_id"], key, content)
        if fields.stream:
            self.pieces.expect(call, fields.num_samples)
        try:
            request_id = await self.context.promise(call)
        except BaseException:
            self.pieces.forget(call)
            raise
        return replace(call, request_id=request_id, body=b"")

    def _content(self, body: Mapping[str, Any], ends: int) -> bytes:
        """Return the content of a call. The limit on stop strings counts only the client's; the
        tokens that end an answer come on top."""
        content, limits = json.dumps(body).encode(), self.context.limits
        try:
            form = schemas.SampleForm.model_validate_json(content)
        except ValidationError as error:
            raise HttpError(400, complaints(error)) from error
        check_sample(form, replace(limits, stop=limits.stop + ends), self.context.facts.vocabulary)
        if len(content) > limits.sample_bytes:
            size, limit = len(content), limits.sample_bytes
            raise HttpError(413, f"the prompt has {size} bytes, and limit sample_bytes is {limit}")
        return content

    async def result(self, request: Request, call: Call) -> Samples:
        """Return the samples once they are drawn, and drop them here."""
        try:
            async for samples in self.follow(request, call):
                if isinstance(samples, Samples):
                    return samples
        finally:
            await self.drop(call)
        raise AssertionError("the iterator ends with the samples")

    async def drop(self, call: Call) -> None:
        """Drop a request that nobody reads any more, drawn or not."""
        self.pieces.forget(call)
        await self.context.write(self.context.journal.drop_sample, call.request_id, call.key)

    async def follow(
        self, request: Request, call: Call
    ) -> AsyncIterator[Samples | Sequence[Sequence[int]]]:
        """Yield the tokens of each answer so far, often, and at the end the samples. The caller
        drops the request."""
        waiters = self.context.waiters
        while (result := await waiters.result(call.request_id, POLL_S)) is None:
            if waiters.closed:
                raise HttpError(503, "the server stops")
            if await request.is_disconnected():
                raise HttpError(499, "the client has closed its connection")  # nobody reads it
            yield self.pieces.of(call)
        if result.outcome is None:
            raise HttpError(503, "the result is no longer kept")
        if isinstance(result.outcome, Failure):
            status = 400 if result.outcome.category == "user" else 500
            raise HttpError(status, result.outcome.text)
        yield read_samples(result.outcome.content)

    async def _sampler(self, key: str, model: str) -> _Sampler:
        """Return the sampling session of a model: the base model, or a checkpoint of this key."""
        path = self._path(model)
        checkpoint = self.checkpoint(key, model)
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

    def checkpoint(self, key: str, model: str) -> NamedCheckpoint | None:
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
