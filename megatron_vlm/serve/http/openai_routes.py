"""OpenAI's routes of models, of chats, and of completions, which continue or score texts and tokens
without a chat template. Errors, usage and log-probs have one form in all of its routes."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import (
    ChatForm,
    ChatRequest,
    CompletionForm,
    GrowingReplies,
    Reply,
    read_form,
    replies,
)
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, safe_text, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples, ChatTexts, SamplingFields
from megatron_vlm.serve.http.context import AnyFront, Key
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.journal.journal_records import Call, plain_name
from megatron_vlm.serve.protocol.chat_messages import read_prompts
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


_MAX_TOKENS = 16  # OpenAI's default


@router.post("/completions")
async def completions(request: Request, chats: Chats, context: AnyFront, key: Key) -> Response:
    """Continue texts or tokens. With `echo` the prompts are scored, too."""
    form = await read_form(context, request, CompletionForm)
    prompts = [
        each if isinstance(each, list) else await chats.prompts.encode(key, each)
        for each in read_prompts(form.prompt, context.limits.client_samples)
    ]
    grammar = await chats.hold(key, False, form.grammar)
    calls = await _begun(chats, key, form, prompts, grammar)
    if form.is_streamed:

        async def drop() -> None:
            await asyncio.gather(*map(chats.drop, calls))

        growing = [
            GrowingReplies(chats, request, call, ChatRequest.of_tokens(prompt, form))
            for prompt, call in zip(prompts, calls, strict=True)
        ]
        return streamed(_text_events(form, growing), lambda e: event(error_body(e)), drop)
    samples = await _drawn(request, chats, calls)
    body = await asyncio.to_thread(_body, chats.texts, form, prompts, samples)
    spent = sum(len(sequence.tokens) for each in samples for sequence in each.sequences)
    used = usage(sum(map(len, prompts)), 0 if form.max_tokens == 0 else spent)
    if not form.stream:
        return await asyncio.to_thread(JSONResponse, {**body, "usage": used})

    async def events() -> AsyncIterator[str]:
        yield await asyncio.to_thread(event, body)
        if form.stream_options.include_usage:
            yield event({**body, "choices": [], "usage": used})
        yield DONE

    return streamed(events(), lambda error: event(error_body(error)))


async def _text_events(
    form: CompletionForm, growing: Sequence[GrowingReplies]
) -> AsyncIterator[str]:
    """Yield the events of a stream, one prompt after the other, though all are drawn at once."""
    spent, head = [0, 0], _head(form)
    for first, each in zip(range(0, len(growing) * form.n, form.n), growing, strict=True):
        ids, texts = each.question.prompt.ids, each.texts
        none = {"logprobs": None, "finish_reason": None}
        for index in range(first, first + form.n if form.echo else first):
            yield event({**head, "choices": [{"index": index, "text": texts.text(ids), **none}]})
        async for deltas in each.deltas():
            choices = [{"index": first + d.index, "text": d.text, **none} for d in deltas]
            yield event({**head, "choices": choices}) if choices else ": waiting\n\n"
        for index, reply in enumerate(each.replies, first):
            choice = _continuation(texts, form, ids, Samples(()), reply) | {"text": ""}
            yield event({**head, "choices": [{"index": index, **choice}]})
        spent[0] += len(ids)
        spent[1] += sum(len(reply.sampled.tokens) for reply in each.replies)
    if form.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": usage(*spent)})
    yield DONE


async def _begun(
    chats: ChatSamples,
    key: str,
    form: CompletionForm,
    prompts: list[list[int]],
    grammar: tuple[str, str] | None,
) -> list[Call]:
    """Queue the samples of each prompt. If one is refused, all are dropped."""
    fields = replace(_fields(form), grammar=grammar)
    asked = [
        chats.begin(key, form.model, [{"type": "encoded_text", "tokens": each}], len(each), fields)
        for each in prompts
    ]
    begun = await asyncio.gather(*asked, return_exceptions=True)
    calls = [each for each in begun if isinstance(each, Call)]
    if refused := [each for each in begun if isinstance(each, BaseException)]:
        await asyncio.gather(*map(chats.drop, calls))
        raise refused[0]
    return calls


async def _drawn(request: Request, chats: ChatSamples, calls: Sequence[Call]) -> list[Samples]:
    """Return the samples of each prompt. If one fails, all are dropped."""
    try:
        async with asyncio.TaskGroup() as group:
            drawn = [group.create_task(chats.result(request, call)) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [each.result() for each in drawn]


def _body(
    texts: ChatTexts, form: CompletionForm, prompts: list[list[int]], samples: list[Samples]
) -> Json:
    choices = [
        _continuation(texts, form, prompt, each, reply)
        for prompt, each in zip(prompts, samples, strict=True)
        for reply in replies(texts, ChatRequest.of_tokens(prompt, form), _best(form, each))
    ]
    choices = [{"index": index, **choice} for index, choice in enumerate(choices)]
    return _head(form) | {"choices": choices}


def _head(form: CompletionForm) -> Json:
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
    return head | {"created": int(time.time()), "model": form.model}


def _best(form: CompletionForm, samples: Samples) -> Samples:
    """Return the `n` answers with the highest log-prob per token, if there are more."""
    if form.best_of is None:
        return samples
    ranked = sorted(samples.sequences, key=lambda each: -np.asarray(each.log_probs).mean())
    return replace(samples, sequences=tuple(ranked[: form.n]))


def _fields(form: CompletionForm) -> SamplingFields:
    """Return the fields of the samples. At least one token is drawn, also where a prompt is only
    scored."""
    top, is_scored = form.logprobs or 0, form.echo and form.logprobs is not None
    return form.sampling(
        num_samples=form.best_of or form.n,
        max_tokens=_MAX_TOKENS if form.max_tokens is None else max(form.max_tokens, 1),
        top_sample=top,
        prompt_log_probs=is_scored,
        top_prompt=top if is_scored else 0,
        stream=form.is_streamed,
    )


def _continuation(
    texts: ChatTexts, form: CompletionForm, prompt: list[int], samples: Samples, reply: Reply
) -> Json:
    sampled = reply.sampled
    # With the token that ends it: lm-eval leaves the last one out, which follows its prompt.
    drawn = [] if form.max_tokens == 0 else sampled.tokens.tolist()
    text = "" if form.max_tokens == 0 else reply.answer.content
    choice: Json = {
        "text": (texts.text(prompt) if form.echo else "") + text,
        "logprobs": None,
        "finish_reason": "stop" if reply.is_whole else "length",
    }
    if form.grammar is not None:
        choice["masked"] = True
    if form.return_token_ids:
        choice |= {"token_ids": sampled.tokens.tolist(), "prompt_token_ids": prompt}
    if form.logprobs is not None:
        entries = _scored(texts, sampled.log_probs, sampled.top, drawn)
        if form.echo:
            before = _scored(texts, samples.prompt_log_probs, samples.top_prompt, prompt)
            entries = [*before, *entries]
        choice["logprobs"] = _columns(entries)
    return choice


def _scored(
    texts: ChatTexts, log_probs: Any, top: TopK | None, ids: Sequence[int]
) -> list[tuple[str, float | None, Json | None]]:
    """Return the text of each token with its log-prob, and with the most likely ones. The first
    token of a prompt has neither."""
    scored: list[tuple[str, float | None, Json | None]] = []
    for place, token in enumerate(ids):
        name, value = token_text(texts, token), float(log_probs[place])
        if math.isnan(value):
            scored.append((name, None, None))
            continue
        likely: Json = {}
        if top is not None:
            # The most likely of the tokens that have the same text, which come first.
            entries = reversed(top_entries(texts, top, place))
            likely = {each["token"]: each["logprob"] for each in entries}
            # lm-eval asks whether the token has exactly the highest value.
            if token in top.ids[place] or name not in likely:
                likely[name] = value
        scored.append((name, value, likely))
    return scored


def _columns(entries: Sequence[tuple[str, float | None, Json | None]]) -> Json:
    names = [name for name, _, _ in entries]
    columns = {"tokens": names, "token_logprobs": [value for _, value, _ in entries]}
    offsets = [0, *accumulate(map(len, names))]
    top = [likely for _, _, likely in entries]
    return {**columns, "top_logprobs": top, "text_offset": offsets[:-1]}
