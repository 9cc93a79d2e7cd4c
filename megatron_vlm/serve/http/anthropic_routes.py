"""Anthropic's routes: messages, and the count of their tokens."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_vlm.serve.http.chat_forms import (
    AnthropicForm,
    ChatRequest,
    GrowingReplies,
    Reply,
    read_form,
    replies,
)
from megatron_vlm.serve.http.chat_routing import Chats, Json, event, route_with, safe_text, streamed
from megatron_vlm.serve.http.chat_samples import ChatSamples
from megatron_vlm.serve.http.context import AnyFront, Key
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.protocol.chat_messages import from_anthropic

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

# An empty block, the type of its deltas, and the field of its text.
_BLOCKS = {
    "thoughts": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking"),
    "content": ({"type": "text", "text": ""}, "text", "text"),
}


def anthropic_error(error: HttpError) -> Json:
    """Return the body of an error."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": safe_text(error)}}


router = APIRouter(route_class=route_with(anthropic_error))


@router.post("/messages/count_tokens")
async def count_tokens(request: Request, chats: Chats, context: AnyFront, key: Key) -> Json:
    """Return the number of tokens of messages, image tokens included."""
    form = await read_form(context, request, AnthropicForm)
    chats.source.check_model(key, form.model)
    return {"input_tokens": len((await _question(chats, key, form)).prompt.ids)}


@router.post("/messages")
async def messages(request: Request, chats: Chats, context: AnyFront, key: Key) -> Response:
    """Answer messages."""
    form = await read_form(context, request, AnthropicForm)
    if form.max_tokens is None:
        raise HttpError(400, "max_tokens: Field required")
    question = await _question(chats, key, form)
    prompt, is_single = question.prompt, bool(form.tool_choice.get("disable_parallel_tool_use"))
    held = prompt.is_thinking, form.grammar, question.tools, form.tool_choice, is_single
    fields = replace(form.sampling, grammar=await chats.hold(key, *held))
    call = await chats.begin(key, form.model, prompt.chunks, len(prompt.ids), fields)
    head: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    head["model"] = form.model
    if form.stream:
        growing = GrowingReplies(chats, request, call, question)
        events = _events(head, len(prompt.ids), growing)
        end = partial(chats.drop, call)
        return streamed(events, lambda error: event(anthropic_error(error), "error"), end)
    samples = await chats.result(request, call)
    [reply] = await asyncio.to_thread(replies, chats.texts, question, samples)
    tokens = {"input_tokens": len(prompt.ids), "output_tokens": len(reply.sampled.tokens)}
    return JSONResponse({**head, "content": _blocks(reply), **_end(reply), "usage": tokens})


async def _question(chats: ChatSamples, key: str, form: AnthropicForm) -> ChatRequest:
    messages = from_anthropic(form.system, form.messages)
    variables = chats.prompts.no_thinking(form.thinking.get("type") == "disabled")
    prompt = await chats.prompts.render(key, messages, form.offered_tools, variables)
    return ChatRequest(prompt, form.offered_tools, form.sampling.stops)


def _blocks(reply: Reply) -> list[Json]:
    answer = reply.answer
    blocks: list[Json] = []
    if answer.thoughts:
        blocks.append({"type": "thinking", "thinking": answer.thoughts, "signature": ""})
    if answer.content or not (answer.calls or blocks):
        blocks.append({"type": "text", "text": answer.content})
    return [*blocks, *_calls(reply)]


def _calls(reply: Reply) -> list[Json]:
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in reply.answer.calls
    ]


def _end(reply: Reply) -> Json:
    reason = "end_turn" if reply.is_whole else "max_tokens"
    if reply.stop is not None:
        reason = "stop_sequence"
    return {
        "stop_reason": "tool_use" if reply.answer.calls else reason,
        "stop_sequence": reply.stop,
    }


async def _events(head: Json, length: int, growing: GrowingReplies) -> AsyncIterator[str]:
    """Yield the events of a stream: thoughts, text and calls are blocks, one after the other."""
    none: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    tokens = {"input_tokens": length, "output_tokens": 0}
    yield _said(type="message_start", message={**head, **none, "usage": tokens})
    blocks = _BlockEvents()
    async for deltas in growing.deltas():
        if not deltas:
            yield _said(type="ping")
        for each in deltas:
            for text in blocks.add(*_BLOCKS[each.kind], each.text):
                yield text
    [reply] = growing.replies
    for call in _calls(reply):
        arguments = json.dumps(call["input"])
        for text in blocks.add({**call, "input": {}}, "input_json", "partial_json", arguments):
            yield text
    for text in blocks.end():
        yield text
    drawn = {"output_tokens": len(reply.sampled.tokens)}
    yield _said(type="message_delta", delta=_end(reply), usage=drawn)
    yield _said(type="message_stop")


class _BlockEvents:
    """Events of the blocks of an answer."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def add(self, block: Json, kind: str, name: str, text: str) -> Iterator[str]:
        """Yield the events for more text in a block of this type. Each call is a new block."""
        if block["type"] != self._kind or "id" in block:
            yield from self.end()
            self._index, self._kind = self._index + 1, block["type"]
            yield _said(type="content_block_start", index=self._index, content_block=block)
        delta = {"type": f"{kind}_delta", name: text}
        yield _said(type="content_block_delta", index=self._index, delta=delta)

    def end(self) -> Iterator[str]:
        """Yield the end of the last block."""
        if self._index >= 0:
            yield _said(type="content_block_stop", index=self._index)


def _said(**data: Any) -> str:
    return event(data, data["type"])
