"""OpenAI's completions, which continue or score texts and tokens without a chat template."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import (
    ChatRequest,
    CompletionForm,
    GrowingReplies,
    Reply,
    read_form,
    replies,
)
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples, ChatTexts, SamplingFields
from megatron_vlm.serve.http.context import AnyFront, Key
from megatron_vlm.serve.http.openai_routes import DONE, error_body, token_text, top_entries, usage
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.chat_messages import read_prompts
from megatron_vlm.serve.protocol.payloads import Samples, TopK

router = APIRouter(route_class=route_with(error_body))
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
