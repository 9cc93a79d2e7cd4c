"""Prompts and samples of chats, for OpenAI's and Anthropic's routes. The front process renders
chats. Each request of a client becomes one sampling request, with the same keys and limits."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

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
from megatron_vlm.serve.http.context import Front, complaints
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.http.sampling_routes import check_sample
from megatron_vlm.serve.journal.journal_records import SAMPLE, Call
from megatron_vlm.serve.protocol.chat_messages import Json, read_messages, text_length
from megatron_vlm.serve.protocol.payloads import RequestError, Samples

MAX_TOKEN_LENGTH = 16  # maximum characters of a token on average; usual text has about 4
T = TypeVar("T")
DrawnAnswers: TypeAlias = Sequence[tuple[list[int], Sequence[int]]]  # each after its prompt
DrawnOf: TypeAlias = Callable[[str], DrawnAnswers]  # those that a key may send back


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
        drawn: DrawnAnswers = (),
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

    def __init__(self, texts: ChatTexts, longest: int, max_pictures: int, drawn: DrawnOf) -> None:
        self.texts, self.longest, self._max_pictures = texts, longest, max_pictures
        self.drawn = drawn
        self._thread = ThreadPoolExecutor(1, "chat")
        # By key; one that nobody holds or waits for is forgotten, since each episode has a key.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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

        async with self._turn(key):
            chat = await asyncio.to_thread(read)
            try:
                given = chat, tools, variables, self.drawn(key)
                return await self._in_thread(self.texts.prompt, *given)
            except DataError as error:
                if error.key != "data.max_tokens":  # set to what the model takes
                    raise
                raise too_long(self.longest, "the prompt has more tokens", "messages") from error

    async def encode(self, key: str, text: str) -> list[int]:
        """Return the tokens of a text."""
        self._check_length(text, "prompt")
        async with self._turn(key):
            return await self._in_thread(self.texts.encode, text)

    async def check(self, key: str, grammar: Grammar) -> None:
        """Refuse a grammar that is wrong, or needs too much work."""
        async with self._turn(key):
            await asyncio.to_thread(check_grammar, grammar)

    def _turn(self, key: str) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())

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


class ChatSource(Protocol):
    """Source of the samples of chats: the journal of the service, or an episode of `rl`."""

    async def place(self, key: str, model: str) -> tuple[str, int]:
        """Return the owner and the number of a new call."""

    async def accept(self, call: Call, streamed: int) -> Call:
        """Queue a call, and return it with its id. `streamed`: number of answers whose tokens
        its client receives while they are drawn."""

    def follow(
        self, request: Request, call: Call
    ) -> AsyncIterator[Samples | Sequence[Sequence[int]]]:
        """Yield the tokens of each answer so far, often, and at the end the samples. The caller
        drops the request."""

    async def drop(self, call: Call) -> None:
        """Drop a request that nobody reads any more, drawn or not."""

    def drawn(self, key: str) -> DrawnAnswers:
        """Return the answers whose tokens a later prompt has as they were drawn."""

    def check_model(self, key: str, model: str) -> None:
        """Raise a 404 if this key has no such model."""

    def models(self, key: str) -> dict[str, tuple[str, float]]:
        """Return the models of this key, each with its owner and the time of its creation."""


class ChatSamples:
    """The tokenizer, and the samples of all keys."""

    def __init__(self, context: Front, texts: ChatTexts, longest: int, source: ChatSource) -> None:
        """`longest`: maximum tokens of a prompt with its answer."""
        self.context, self.texts, self.longest = context, texts, longest
        self.source, self.follow, self.drop = source, source.follow, source.drop
        self.prompts = ChatPrompts(texts, longest, context.limits.pictures, source.drawn)

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
        most = fields.max_tokens or min(room, self.context.limits.max_tokens)
        if room < 1 or (most > room and not self.context.facts.cuts_answers):
            asked = f"the prompt has {length} tokens and max_tokens is {fields.max_tokens}"
            raise too_long(self.longest, asked, "max_tokens")
        if fields.penalties and not self.context.facts.has_penalties:
            name, value = next(iter(fields.penalties.items()))
            raise _beyond_sampler(name, found=value)
        owner, number = await self.source.place(key, model)
        ends = self.texts.ends if fields.stops else ()
        body = {
            "sampling_session_id": owner,
            "seq_id": number,
            "prompt": {"chunks": list(chunks)},
            "num_samples": fields.num_samples,
            "sampling_params": {
                "max_tokens": min(most, room),
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
        call = Call(SAMPLE, owner, number, key, content)
        return await self.source.accept(call, fields.num_samples if fields.stream else 0)

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
