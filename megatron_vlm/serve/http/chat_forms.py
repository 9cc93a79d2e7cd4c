"""OpenAI's and Anthropic's requests, and the replies to them: their parts, and their growth while
tokens are drawn. A field that would change the answer, and that this service does not carry out, is
refused by its name, and so is a field that nobody knows."""

import asyncio
import difflib
import json
import re
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import Field, ValidationInfo, field_validator

from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.serve.http.answer_grammar import Grammar, GrammarFields, grammar_of_format
from megatron_vlm.serve.http.chat_samples import ChatPrompt, ChatSamples, ChatTexts, SamplingFields
from megatron_vlm.serve.http.context import Front
from megatron_vlm.serve.http.request_bodies import parse_body
from megatron_vlm.serve.http.schemas import Id, JsonForm, Penalties, Positive, Text
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.chat_messages import (
    AnswerStream,
    ChatAnswer,
    cut_at_stop,
    read_answer,
)
from megatron_vlm.serve.protocol.payloads import RequestError, Sampled, Samples

# Fields that clients send by themselves, and that change no answer here.
_SENT_ALONG = (
    "user metadata store max_tool_calls service_tier safety_identifier prompt_cache_key "
    "prompt_cache_options prompt_cache_retention verbosity cache_control cache_salt priority "
    "request_id inference_geo speed diagnostics user_profile_id workspace_id billing_policy betas "
    "anthropic_version"
)
# The value with which each of these fields changes nothing; null: there is none. With any other
# value it is refused.
_NEUTRAL: Mapping[str, Any] = json.loads("""{
    "length_penalty": 1, "best_of": 1, "echo": false, "suffix": "",
    "modalities": ["text"], "functions": [], "documents": [],
    "function_call": "auto", "stop_token_ids": [], "ignore_eos": false, "use_beam_search": false,
    "bad_words": [], "add_special_tokens": false, "skip_special_tokens": true,
    "spaces_between_special_tokens": true, "include_stop_str_in_output": false,
    "include_reasoning": true, "return_tokens_as_token_ids": false, "prompt_logprobs": 0,
    "mm_processor_kwargs": {}, "mcp_servers": [],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "audio": null, "prediction": null, "web_search_options": null, "moderation": null,
    "allowed_token_ids": null, "chat_template": null,
    "truncate_prompt_tokens": null, "thinking_token_budget": null, "kv_transfer_params": null,
    "vllm_xargs": null, "container": null, "compaction": null, "fallbacks": null, "thread": null
}""")
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


async def read_form(context: Front, request: Request, of: type[AForm]) -> AForm:
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
    check_request_fields(given, of.model_fields.keys())
    return of.model_validate(given)


def check_request_fields(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse the first field that may change the answer, and that is not carried out."""
    for name, value in given.items():
        if name in known or name in _SENT_ALONG.split():
            continue
        if name not in _NEUTRAL:
            near = difflib.get_close_matches(name[:80], [*known, *_NEUTRAL], n=1, cutoff=0.75)
            remedy = f"write {near[0]}, or leave it out" if near else "leave it out"
            raise RequestError("is not a field of this request", key=name[:80], remedy=remedy)
        if value not in ((neutral := _NEUTRAL[name]), {}, []):
            give = "" if neutral is None else f"give {json.dumps(neutral)}, or "
            raise RequestError(
                "is not supported", key=name, found=value, remedy=f"{give}leave it out"
            )


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


class CompletionFields(ApiForm, GrammarFields, Penalties):
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
        return tuple(filter(None, stops))

    def sampling(self, **more: Any) -> SamplingFields:
        """Return the fields of the samples."""
        names = "max_tokens", "temperature", "top_p", "top_k", "seed", "stops"
        own = {name: getattr(self, name) for name in names} | {"num_samples": self.n}
        own["penalties"] = self.model_dump(include={*Penalties.model_fields}, exclude_defaults=True)
        return SamplingFields(**own | more)


class ToolFields(CompletionFields):
    """Fields of chat completions and of Responses."""

    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Objects = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})


class ChatForm(ToolFields):
    """Body of chat/completions."""

    messages: Any
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check_ending(self) -> None:
        """Refuse to begin an answer after an answer, and to continue another message."""
        ends = self.messages[-1] if isinstance(self.messages, list) and self.messages else None
        is_answer = isinstance(ends, dict) and ends.get("role") == "assistant"
        rights = {"continue_final_message": is_answer, "add_generation_prompt": not is_answer}
        for key, right in rights.items():
            if (found := getattr(self, key)) not in (None, right):
                end = "an answer" if is_answer else "no answer"
                problem = f"does not go with messages that end in {end}"
                raise RequestError(problem, key=key, found=found, allowed=(right,))

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools


class CompletionForm(CompletionFields):
    """Body of completions."""

    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Count | None = None  # draw this many, and return the `n` with the best log-probs

    @field_validator("best_of")
    @classmethod
    def _whole(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and (value < info.data.get("n", 1) or info.data.get("stream")):
            raise ValueError("give at least n, without stream")
        return value

    @property
    def is_streamed(self) -> bool:
        """True if answers come in pieces. With log-probs a stream has them at once."""
        return self.stream and self.logprobs is None and self.max_tokens != 0


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
    output_config: dict[str, Any] = Field({})

    @field_validator("output_config")
    @classmethod
    def _output(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value.keys() - {"effort", "format"}:
            raise ValueError(f"{name[:80]} is not supported; leave it out")
        return value

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the format holds the answer to."""
        return grammar_of_format(self.output_config.get("format"), "output_config.format")

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools in the form of chat completions."""
        is_off = self.tool_choice.get("type") == "none"
        return [] if is_off else as_functions(self.tools, "custom", "input_schema")

    @property
    def sampling(self) -> SamplingFields:
        stops = tuple(filter(None, self.stop_sequences))
        drawn = self.max_tokens, self.temperature, self.top_p, self.top_k
        return SamplingFields(1, *drawn, stops=stops, stream=self.stream)


PIECE_S = 0.05  # seconds between two events of a stream
PING_S = 15.0  # seconds without one after which a stream says that it is alive


@dataclass(frozen=True)
class ChatRequest:
    """A chat that is to be answered."""

    prompt: ChatPrompt
    tools: Sequence[dict[str, Any]]
    stops: Sequence[str]
    num_answers: int = 1
    is_chat: bool = True  # thoughts and calls are no text
    is_held: bool = False  # its answers are held to a grammar

    @staticmethod
    def of_tokens(ids: list[int], form: CompletionForm) -> "ChatRequest":
        """Return a prompt that is no chat."""
        prompt = ChatPrompt([], ids, is_thinking=False)
        return ChatRequest(prompt, (), form.stops, form.n, is_chat=False)

    def format_in(self, texts: ChatTexts) -> ChatFormat | None:
        """Return the format of its answers; None: they are text."""
        return texts.chat_format if self.is_chat else None


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
    chat_format = question.format_in(texts)
    answer = read_answer(chat_format, text, question.prompt.is_thinking, question.tools)
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
        chat_format, is_thinking = question.format_in(self.texts), question.prompt.is_thinking
        self._streams = [
            AnswerStream(chat_format, is_thinking, question.tools, question.stops)
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
