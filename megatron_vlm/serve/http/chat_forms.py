"""OpenAI's and Anthropic's requests, and the replies to them: their parts, and their growth while
tokens are drawn. A field that would change the answer, and that this service does not carry out, is
refused by its name. All other fields are ignored."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import Field, field_validator

from megatron_vlm.serve.http.chat_samples import ChatPrompt, ChatSamples, ChatTexts, SamplingFields
from megatron_vlm.serve.http.context import AppContext
from megatron_vlm.serve.http.request_bodies import parse_body
from megatron_vlm.serve.http.schemas import Id, JsonForm, Positive, Text
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.chat_messages import (
    AnswerStream,
    ChatAnswer,
    cut_at_stop,
    read_answer,
)
from megatron_vlm.serve.protocol.payloads import RequestError, Sampled, Samples

# The values of each field that change nothing. Clients send them by themselves.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "web_search_options": (),
    "suffix": ("",),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "mm_processor_kwargs": ({},),
    "prompt_logprobs": (0,),
}
AForm = TypeVar("AForm", bound="ApiForm")
Count = Annotated[int, Field(ge=1)]
FromZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Objects = list[dict[str, Any]]
Stops = Text | Annotated[list[Text], Field(max_length=64)] | None
# Half of a character that takes two escapes. Python reads it, but cannot write it again.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_MARKS = 2**21  # maximum marks of a body's lists, objects and texts, each of which takes memory


async def read_form(context: AppContext, request: Request, of: type[AForm]) -> AForm:
    """Read the body of a request. `null` is the default of each field."""
    return await parse_body(await context.body(request, "sample_bytes"), _parse_form, of)


def _parse_form(body: bytes, of: type[AForm]) -> AForm:
    if (marks := sum(map(body.count, (b"[", b"{", b":", b'"')))) > _MARKS:
        raise RequestError(
            f"has {marks} brackets, colons and quotes, and this server reads {_MARKS}",
            place="the body",
            remedy="send less in a request",
        )
    try:
        raw = json.loads(body or b"{}", parse_constant=_refuse_constant)
        if _HALF.search(body):
            json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"is not JSON: {error}", place="the body") from error
    if not isinstance(raw, dict):
        raise RequestError("is not an object", place="the body")
    given = {name: value for name, value in raw.items() if value is not None}
    for name in given.keys() & (_NEUTRAL.keys() - of.model_fields.keys()):
        neutral = (*_NEUTRAL[name], {}, [])
        if given[name] not in neutral:
            raise RequestError(
                "is not supported",
                key=name,
                found=given[name],
                remedy=f"give {neutral[0]!r}, or leave it out",
            )
    return of.model_validate(given)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


class ApiForm(JsonForm):
    """Fields of all requests."""

    model: Id
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stream: bool = False


class StreamOptions(JsonForm):
    include_usage: bool = False


class CompletionFields(ApiForm):
    """Fields of chat completions and of completions."""

    n: Count = 1
    max_tokens: FromZero | None = None
    seed: Seed | None = None
    stop: Stops = None
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def sampling(self, **more: Any) -> SamplingFields:
        """Return the fields of the samples."""
        return SamplingFields(
            **{
                "num_samples": self.n,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "seed": self.seed,
                "stops": self.stops,
                **more,
            }
        )


class ChatForm(CompletionFields):
    """Body of chat/completions."""

    messages: Any
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Objects = Field([])
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None
    response_format: dict[str, Any] = Field({"type": "text"})

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value not in ("auto", "none"):
            raise ValueError("a call cannot be enforced; give auto or none")
        return value

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools

    def answer_schema(self, has_schemas: bool, is_thinking: bool) -> str | None:
        """Return the JSON schema of the answer, or None. `is_thinking`: it begins with thoughts."""
        kind = self.response_format.get("type")
        if kind == "text":
            return None
        if not has_schemas:
            raise RequestError(
                "is not supported by the sampler of this server",
                key="response_format",
                found=kind,
                remedy="serve the model with engine.name=vllm, or leave it out",
            )
        wanted = self.response_format.get("json_schema")
        schema = wanted.get("schema") if isinstance(wanted, dict) else None
        schema = {"type": "object"} if kind == "json_object" else schema
        if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
            raise RequestError(
                key="response_format",
                found=self.response_format,
                allowed="the type text, json_object, or json_schema with a schema",
            )
        if is_thinking:
            raise RequestError(
                "needs an answer without thoughts",
                key="response_format",
                found=kind,
                remedy="give reasoning_effort=none, if the chat template can switch thoughts off",
            )
        return json.dumps(schema)


class CompletionForm(CompletionFields):
    """Body of completions."""

    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None


def as_functions(tools: Objects, kind: str, schema: str) -> Objects:
    """Return tools of this type in the form of chat completions. `schema` is their field of
    parameters."""
    names = {"name": "name", "description": "description", schema: "parameters"}
    functions = []
    for number, tool in enumerate(tools):
        if (given := tool.get("type") or kind) != kind:
            where = f"tools[{number}].type"
            raise RequestError(
                ": this server has no such tool", key=where, found=given, allowed=kind
            )
        function = {ours: tool[theirs] for theirs, ours in names.items() if theirs in tool}
        functions.append({"type": "function", "function": function})
    return functions


class AnthropicForm(ApiForm):
    """Body of messages, and of count_tokens, which has no max_tokens."""

    messages: Any
    max_tokens: Count | None = None
    system: Any = None
    stop_sequences: list[Text] = Field([], max_length=64)
    tools: Objects = Field([])
    tool_choice: dict[str, Any] = Field({"type": "auto"})
    thinking: dict[str, Any] = Field({})

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") not in ("auto", "none"):
            raise ValueError("a call cannot be enforced; give the type auto or none")
        return value

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools in the form of chat completions."""
        is_off = self.tool_choice["type"] == "none"
        return [] if is_off else as_functions(self.tools, "custom", "input_schema")

    @property
    def sampling(self) -> SamplingFields:
        return SamplingFields(
            1,
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            stops=tuple(stop for stop in self.stop_sequences if stop),
            stream=self.stream,
        )


PIECE_S = 0.05  # seconds between two events of a stream
PING_S = 15.0  # seconds without one after which a stream says that it is alive


@dataclass(frozen=True)
class ChatRequest:
    """A chat that is to be answered."""

    prompt: ChatPrompt
    tools: Sequence[dict[str, Any]]
    stops: Sequence[str]
    num_answers: int = 1

    @staticmethod
    def of_tokens(ids: list[int], stops: Sequence[str]) -> "ChatRequest":
        """Return a prompt that is no chat."""
        return ChatRequest(ChatPrompt([], ids, is_thinking=False), (), stops)


@dataclass(frozen=True)
class Reply:
    """An answer to a chat."""

    sampled: Sampled
    answer: ChatAnswer
    stop: str | None  # the stop string that has ended it
    shown: int  # number of its tokens that are not the end or a part of a stop string

    @property
    def is_whole(self) -> bool:
        """True if it ended by itself."""
        return self.sampled.stopped


@dataclass(frozen=True)
class Delta:
    """Text that follows in an answer."""

    index: int
    kind: Literal["thoughts", "content"]
    text: str


def replies(texts: ChatTexts, question: ChatRequest, samples: Samples) -> list[Reply]:
    """Return the answers that were drawn."""
    return [_reply(texts, question, sampled) for sampled in samples.sequences]


def _reply(texts: ChatTexts, question: ChatRequest, sampled: Sampled) -> Reply:
    ids = sampled.tokens.tolist()
    text, stop = cut_at_stop(texts.text(ids), question.stops)
    shown = len(ids) - (sampled.stopped and stop is None)
    if stop is not None:
        shown = _tokens_before(texts, ids, len(text.encode()))
    answer = read_answer(texts.chat_format, text, question.prompt.is_thinking, question.tools)
    return Reply(sampled, answer, stop, shown)


def _tokens_before(texts: ChatTexts, ids: Sequence[int], size: int) -> int:
    """Return how many tokens begin within the first bytes of the text."""
    begun = 0
    for number, token in enumerate(ids):
        if begun >= size:
            return number
        begun += len(texts.bytes_of(token))
    return len(ids)


def thought_tokens(texts: ChatTexts, reply: Reply) -> int:
    """Return the number of an answer's tokens up to the end of its thoughts."""
    if reply.answer.thoughts is None:
        return 0
    ids, mark = reply.sampled.tokens.tolist(), texts.chat_format.thoughts.end.encode()
    before, end, _ = b"".join(map(texts.bytes_of, ids)).partition(mark)
    return _tokens_before(texts, ids, len(before + end))


class GrowingReplies:
    """Answers to a chat while they are drawn. At the end `replies` has them."""

    def __init__(
        self, chats: ChatSamples, request: Request, call: Call, question: ChatRequest
    ) -> None:
        self.question, self.texts = question, chats.texts
        self.replies: list[Reply] = []
        self._news = chats.follow(request, call)
        self._streams = [
            AnswerStream(
                self.texts.chat_format, question.prompt.is_thinking, question.tools, question.stops
            )
            for _ in range(question.num_answers)
        ]
        self._grow = [chats.texts.growing() for _ in self._streams]

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what follows in the answers. An empty list says that the connection is alive."""
        told = time.monotonic()
        async for news in self._news:
            if isinstance(news, Samples):
                self.replies = await asyncio.to_thread(replies, self.texts, self.question, news)
                ends = zip(self._streams, self.replies, strict=True)
                yield _deltas([stream.end(reply.answer) for stream, reply in ends])
                continue
            grown = zip(self._streams, self._grow, news, strict=False)  # none is not streamed
            deltas = _deltas([stream.advance(grow(ids)) for stream, grow, ids in grown])
            if deltas or time.monotonic() - told > PING_S:
                told = time.monotonic()
                yield deltas
                await asyncio.sleep(PIECE_S)


def _deltas(grown: Sequence[tuple[str, str]]) -> list[Delta]:
    """Return the texts that are not empty."""
    deltas: list[Delta] = []
    for index, (thoughts, content) in enumerate(grown):
        deltas += [Delta(index, "thoughts", thoughts)] if thoughts else []
        deltas += [Delta(index, "content", content)] if content else []
    return deltas
