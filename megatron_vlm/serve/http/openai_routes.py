"""OpenAI's routes of models and chats. Errors, usage and log-probs have one form in all of its
routes."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import (
    ChatForm,
    ChatRequest,
    GrowingReplies,
    Reply,
    read_form,
    replies,
)
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, safe_text, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples, ChatTexts
from megatron_vlm.serve.http.context import AnyFront, Key
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.journal.journal_records import Call, plain_name
from megatron_vlm.serve.protocol.payloads import NO_LOG_PROB, Samples, TopK

DONE = "data: [DONE]\n\n"  # the last event of a stream
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: HttpError) -> Json:
    """Return the body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"type": _TYPES.get(error.status, kind), "param": error.param, "code": error.code}
    return {"error": {"message": safe_text(error), **fields}}


def usage(prompt: int, drawn: int) -> Json:
    """Return a request's token counts, image and end tokens included."""
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def token_text(texts: ChatTexts, token: int) -> str:
    """Return the text of a token, which may be a part of a character."""
    return texts.bytes_of(token).decode(errors="replace")


def token_entry(texts: ChatTexts, token: int, log_prob: float) -> Json:
    """Return a token with its log-prob."""
    raw = list(texts.bytes_of(token))
    return {"token": token_text(texts, token), "logprob": log_prob, "bytes": raw}


def top_entries(texts: ChatTexts, top: TopK | None, place: int) -> list[Json]:
    """Return the most likely tokens at a place."""
    if top is None:
        return []
    pairs = zip(top.ids[place].tolist(), top.log_probs[place].tolist(), strict=True)
    return [token_entry(texts, token, value) for token, value in pairs if value != NO_LOG_PROB]


def log_prob_entries(texts: ChatTexts, reply: Reply) -> list[Json]:
    """Return the log-probs of an answer's tokens, without its end."""
    ids, log_probs = reply.sampled.tokens.tolist(), reply.sampled.log_probs
    assert log_probs is not None
    return [
        token_entry(texts, ids[place], float(log_probs[place]))
        | {"top_logprobs": top_entries(texts, reply.sampled.top, place)}
        for place in range(reply.shown)
    ]


_FIELDS = {"thoughts": "reasoning_content", "content": "content"}


router = APIRouter(route_class=route_with(error_body))


@router.get("/models")
async def models(chats: Chats, context: AnyFront, key: Key) -> Json:
    """List the base model, and the checkpoints of this key that can be sampled."""
    return {"object": "list", "data": list(_models(chats, key).values())}


@router.get("/models/{name:path}")
async def model(name: str, chats: Chats, context: AnyFront, key: Key) -> Json:
    """Return a model."""
    if (card := _models(chats, key).get(name)) is None:
        text = f"there is no model {name[:200]!r}"
        raise HttpError(404, text, param="model", code="model_not_found")
    return card


def _models(chats: ChatSamples, key: str) -> dict[str, Json]:
    """Return the models by their names. Each has a second name too."""
    names = chats.source.models(key)
    names |= {plain_name(name): facts for name, facts in names.items()}
    same = {"object": "model", "max_model_len": chats.longest}
    return {
        name: {"id": name, "created": int(created), "owned_by": owner, **same}
        for name, (owner, created) in names.items()
    }


@router.post("/chat/completions")
async def chat_completions(request: Request, chats: Chats, context: AnyFront, key: Key) -> Response:
    """Answer a chat."""
    form = await read_form(context, request, ChatForm)
    question, call = await begin_chat(chats, key, form)
    whole = _Whole(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), form, question, chats.texts)
    if form.stream:
        growing = GrowingReplies(chats, request, call, question)
        events = _chat_events(whole, growing)
        return streamed(events, lambda e: event(error_body(e)), partial(chats.drop, call))
    samples = await chats.result(request, call)
    return await asyncio.to_thread(whole.response, samples)


async def begin_chat(chats: ChatSamples, key: str, form: ChatForm) -> tuple[ChatRequest, Call]:
    """Render a chat and queue its samples."""
    form.check_ending()
    variables = (
        chats.prompts.no_thinking(form.reasoning_effort == "none") | form.chat_template_kwargs
    )
    prompt = await chats.prompts.render(key, form.messages, form.offered_tools, variables)
    tools, is_single = form.offered_tools, not form.parallel_tool_calls
    held = prompt.is_thinking, form.grammar, tools, form.tool_choice, is_single
    grammar = await chats.hold(key, *held)
    fields = form.sampling(
        max_tokens=form.max_completion_tokens or form.max_tokens,
        top_sample=form.top_logprobs if form.logprobs else 0,
        grammar=grammar,
        stream=form.stream and not form.logprobs,
    )
    call = await chats.begin(key, form.model, prompt.chunks, len(prompt.ids), fields)
    return ChatRequest(prompt, tools, form.stops, form.n, is_held=grammar is not None), call


class _Whole:
    """The answer to a request of chat completions."""

    def __init__(
        self, name: str, created: int, form: ChatForm, question: ChatRequest, texts: ChatTexts
    ) -> None:
        self.form, self.question, self.texts = form, question, texts
        self.head = {"id": name, "created": created, "model": form.model}

    def response(self, samples: Samples) -> JSONResponse:
        """Return the response, which may have log-probs of millions of tokens."""
        ended = replies(self.texts, self.question, samples)
        choices = []
        for index, reply in enumerate(ended):
            answer = reply.answer
            content = answer.content or (None if answer.calls else "")
            message: Json = {"role": "assistant", "content": content, **self.parts(reply)}
            if answer.thoughts is not None:
                message["reasoning_content"] = answer.thoughts
            choices.append({**self.choice(index, reply), "message": message})
        body = {"object": "chat.completion", **self.head, "choices": choices}
        if self.form.return_token_ids:
            body["prompt_token_ids"] = self.question.prompt.ids
        return JSONResponse({**body, "usage": self.usage(ended)})

    def choice(self, index: int, reply: Reply) -> Json:
        """Return the fields of a choice that belong to its end."""
        reason = "stop" if reply.is_whole else "length"
        reason = "tool_calls" if reply.answer.calls else reason
        choice: Json = {"index": index, "logprobs": None, "finish_reason": reason}
        if self.form.logprobs:
            choice["logprobs"] = {"content": log_prob_entries(self.texts, reply)}
        if self.question.is_held:
            choice["masked"] = True
        if self.form.return_token_ids:
            choice["token_ids"] = reply.sampled.tokens.tolist()
        return choice

    def parts(self, reply: Reply, indexed: bool = False) -> Json:
        """Return the calls of an answer. In a stream they have numbers."""
        calls: list[Json] = []
        for number, call in enumerate(reply.answer.calls):
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            place = {"index": number} if indexed else {}
            calls.append({**place, "id": call.id, "type": "function", "function": function})
        return {"tool_calls": calls} if calls else {}

    def usage(self, ended: Sequence[Reply]) -> Json:
        return usage(len(self.question.prompt.ids), sum(len(r.sampled.tokens) for r in ended))

    def chunk(self, *choices: Json, **more: Any) -> str:
        """Return an event of the stream."""
        return event(
            {"object": "chat.completion.chunk", **self.head, "choices": list(choices), **more}
        )

    def end(self, index: int, reply: Reply) -> str:
        """Return the last event of a choice."""
        return self.chunk({**self.choice(index, reply), "delta": {}})


async def _chat_events(whole: _Whole, growing: GrowingReplies) -> AsyncIterator[str]:
    """Yield the events of a stream. The events of all choices have the same id and time."""
    first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for index in range(whole.question.num_answers):
        yield whole.chunk({"index": index, **first})
    async for deltas in growing.deltas():
        if not deltas:
            yield ": waiting\n\n"
        for each in deltas:
            delta = {"delta": {_FIELDS[each.kind]: each.text}, "finish_reason": None}
            yield whole.chunk({"index": each.index, **delta})
    for index, reply in enumerate(growing.replies):
        if calls := whole.parts(reply, indexed=True):
            yield whole.chunk({"index": index, "delta": calls, "finish_reason": None})
        yield await asyncio.to_thread(whole.end, index, reply)
    if whole.form.stream_options.include_usage:
        yield whole.chunk(usage=whole.usage(growing.replies))
    yield DONE
