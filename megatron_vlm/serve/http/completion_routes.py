"""OpenAI's route of completions: texts and tokens that are continued or scored without a chat
template."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import CompletionForm, read_form
from megatron_vlm.serve.http.chat_prompt import ChatTexts
from megatron_vlm.serve.http.chat_replies import ChatRequest, Reply, replies
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples, SamplingFields
from megatron_vlm.serve.http.context import Context, Key
from megatron_vlm.serve.http.openai_bodies import DONE, error_body, token_text, top_entries, usage
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.payloads import RequestError, Samples, TopK

_MAX_TOKENS = 16  # OpenAI's default

router = APIRouter(route_class=route_with(error_body))


@router.post("/completions")
async def completions(request: Request, chats: Chats, context: Context, key: Key) -> Response:
    """Continue texts or tokens. With `echo` the prompts are scored, too."""
    form = await read_form(context, request, CompletionForm)
    prompts = [
        each if isinstance(each, list) else await chats.prompts.encode(key, each)
        for each in _prompts(form.prompt, context.limits.client_samples)
    ]
    samples = await _drawn(request, chats, key, form, prompts)
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


async def _drawn(
    request: Request, chats: ChatSamples, key: str, form: CompletionForm, prompts: list[list[int]]
) -> list[Samples]:
    """Return the samples of each prompt. If one is refused or fails, all are dropped."""
    fields = _fields(form)
    begun = await asyncio.gather(
        *(
            chats.begin(
                key, form.model, [{"type": "encoded_text", "tokens": prompt}], len(prompt), fields
            )
            for prompt in prompts
        ),
        return_exceptions=True,
    )
    calls = [each for each in begun if isinstance(each, Call)]
    if refused := [each for each in begun if isinstance(each, BaseException)]:
        await asyncio.gather(*map(chats.drop, calls))
        raise refused[0]
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
        for reply in replies(texts, ChatRequest.of_tokens(prompt, form.stops), each)
    ]
    choices = [{"index": index, **choice} for index, choice in enumerate(choices)]
    body: Json = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
    return body | {"created": int(time.time()), "model": form.model, "choices": choices}


def _fields(form: CompletionForm) -> SamplingFields:
    """Return the fields of the samples. At least one token is drawn, also where a prompt is only
    scored."""
    top, is_scored = form.logprobs or 0, form.echo and form.logprobs is not None
    return form.sampling(
        max_tokens=_MAX_TOKENS if form.max_tokens is None else max(form.max_tokens, 1),
        top_sample=top,
        prompt_log_probs=is_scored,
        top_prompt=top if is_scored else 0,
    )


def _prompts(prompt: Any, most: int) -> list[str | list[int]]:
    """Return the prompts of a request: a text, tokens, or a list of either."""
    one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and _is_id(prompt[0])
    )
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise RequestError(
            key="prompt", found=prompt, allowed="a text, a list of tokens, or a list of either"
        )
    if len(prompts) > most:
        raise RequestError(
            f"has {len(prompts)} prompts, and limit client_samples is {most}", key="prompt"
        )
    return prompts


def _is_id(value: Any) -> bool:
    return type(value) is int


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(map(_is_id, value))
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
    offsets, at = [], 0
    for name, _, _ in entries:
        offsets.append(at)
        at += len(name)
    tokens, values, likely = (
        ([*column] for column in zip(*entries, strict=True)) if entries else ([], [], [])
    )
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": likely,
        "text_offset": offsets,
    }
