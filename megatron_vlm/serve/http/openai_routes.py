"""OpenAI's routes for models and chats."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import ChatForm, read_form
from megatron_vlm.serve.http.chat_prompt import ChatTexts
from megatron_vlm.serve.http.chat_replies import ChatRequest, GrowingReplies, Reply, replies
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples
from megatron_vlm.serve.http.context import Context, Key
from megatron_vlm.serve.http.openai_bodies import DONE, error_body, token_entry, top_entries, usage
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.http.sampling_routes import can_be_sampled
from megatron_vlm.serve.protocol.payloads import Samples

_FIELDS = {"thoughts": "reasoning_content", "content": "content"}


router = APIRouter(route_class=route_with(error_body))


@router.get("/models")
async def models(chats: Chats, context: Context, key: Key) -> Json:
    """List the base model, and the checkpoints of this key that can be sampled."""
    return {"object": "list", "data": list(_models(chats, key).values())}


@router.get("/models/{name:path}")
async def model(name: str, chats: Chats, context: Context, key: Key) -> Json:
    """Return a model."""
    if (card := _models(chats, key).get(name)) is None:
        raise HttpError(404, f"there is no model {name!r}", param="model", code="model_not_found")
    return card


def _models(chats: ChatSamples, key: str) -> dict[str, Json]:
    context = chats.context
    names = dict.fromkeys(context.facts.base_models, ("megatron_vlm", 0.0))
    names |= {
        checkpoint.path: (key, checkpoint.created)
        for checkpoint in context.journal.checkpoints(key)
        if can_be_sampled(context, checkpoint)
    }
    return {
        name: {
            "id": name,
            "object": "model",
            "created": int(created),
            "owned_by": owner,
            "max_model_len": chats.longest,
        }
        for name, (owner, created) in names.items()
    }


@router.post("/chat/completions")
async def chat_completions(request: Request, chats: Chats, context: Context, key: Key) -> Response:
    """Answer a chat."""
    form = await read_form(context, request, ChatForm)
    variables = (
        chats.prompts.no_thinking(form.reasoning_effort == "none") | form.chat_template_kwargs
    )
    prompt = await chats.prompts.render(key, form.messages, form.offered_tools, variables)
    question = ChatRequest(prompt, form.offered_tools, form.stops, form.n)
    schema = form.answer_schema(context.facts.has_schemas, prompt.is_thinking)
    fields = form.sampling(
        max_tokens=form.max_completion_tokens or form.max_tokens,
        top_sample=form.top_logprobs if form.logprobs else 0,
        json_schema=schema,
        stream=form.stream and not form.logprobs,
    )
    call = await chats.begin(key, form.model, prompt.chunks, len(prompt.ids), fields)
    whole = _Whole(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), form, question, chats.texts)
    if form.stream:
        growing = GrowingReplies(chats, request, call, question)
        events = _chat_events(whole, growing)
        return streamed(events, lambda e: event(error_body(e)), partial(chats.drop, call))
    samples = await chats.result(request, call)
    return await asyncio.to_thread(whole.response, samples)


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
            message: Json = {
                "role": "assistant",
                "content": reply.answer.content or None,
                **self.parts(reply),
            }
            if not reply.answer.calls:
                message["content"] = reply.answer.content
            if reply.answer.thoughts is not None:
                message["reasoning_content"] = reply.answer.thoughts
            choices.append({**self.choice(index, reply), "message": message})
        body = {"object": "chat.completion", **self.head, "choices": choices}
        if self.form.return_token_ids:
            body["prompt_token_ids"] = self.question.prompt.ids
        return JSONResponse({**body, "usage": self.usage(ended)})

    def choice(self, index: int, reply: Reply) -> Json:
        """Return the fields of a choice that belong to its end."""
        reason = "stop" if reply.is_whole else "length"
        choice: Json = {
            "index": index,
            "logprobs": self._log_probs(reply),
            "finish_reason": "tool_calls" if reply.answer.calls else reason,
        }
        if self.form.return_token_ids:
            choice["token_ids"] = reply.sampled.tokens.tolist()
        return choice

    def parts(self, reply: Reply, indexed: bool = False) -> Json:
        """Return the calls of an answer. In a stream they have numbers."""
        calls = [
            {
                **({"index": number} if indexed else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for number, call in enumerate(reply.answer.calls)
        ]
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

    def _log_probs(self, reply: Reply) -> Json | None:
        if not self.form.logprobs:
            return None
        ids, log_probs = reply.sampled.tokens.tolist(), reply.sampled.log_probs
        assert log_probs is not None
        return {
            "content": [
                {
                    **token_entry(self.texts, ids[place], float(log_probs[place])),
                    "top_logprobs": top_entries(self.texts, reply.sampled.top, place),
                }
                for place in range(reply.shown)
            ]
        }


async def _chat_events(whole: _Whole, growing: GrowingReplies) -> AsyncIterator[str]:
    """Yield the events of a stream. Those of all choices have the same id and time."""
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
