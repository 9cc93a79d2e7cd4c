"""OpenAI's Responses. A request becomes a chat completion and its answer becomes items, so that
prompts, samples and limits are the same in both."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator

from megatron_vlm.serve.http import chat_forms, chat_routing
from megatron_vlm.serve.http.chat_forms import ChatForm, ChatRequest, GrowingReplies, Reply
from megatron_vlm.serve.http.chat_routing import Chats, Json
from megatron_vlm.serve.http.chat_samples import ChatTexts
from megatron_vlm.serve.http.context import AnyFront, Key
from megatron_vlm.serve.http.openai_routes import begin_chat, error_body, log_prob_entries
from megatron_vlm.serve.http.request_bodies import HttpError
from megatron_vlm.serve.protocol.chat_messages import ChatAnswer, as_object, as_text
from megatron_vlm.serve.protocol.payloads import RequestError, Samples

_KEEPS_NOTHING = "this server keeps no responses; send the items of earlier answers in input"
_NO_EMBEDDINGS = (
    "this server draws answers; serve an export of train.objective=embed by "
    "vllm serve RUN/export --runner pooling"
)
_ROLES = ("user", "assistant", "system", "developer")
# Fields of chat completions, and what they are called here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_NAME = re.compile(rf"({'|'.join(_NAMES)})\b(?:\[(\d+)\](?:\.content)?)?")
_ECHOED = (
    "model instructions metadata tools tool_choice parallel_tool_calls text temperature top_p "
    "top_logprobs max_output_tokens reasoning truncation background previous_response_id"
)


class ResponsesForm(chat_forms.ToolFields):
    """Body of responses."""

    input: Any
    instructions: str | None = None
    max_output_tokens: chat_forms.Count | None = None
    n: Literal[1] = 1
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    text: dict[str, Any] = Field({})
    reasoning: dict[str, Any] = Field({})
    metadata: dict[str, str] = Field({})
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None  # a template that is kept

    @field_validator("previous_response_id", "conversation", "prompt")
    @classmethod
    def _not_kept(cls, value: Any) -> Any:
        raise ValueError(_KEEPS_NOTHING)

    @property
    def has_log_probs(self) -> bool:
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include

    def as_chat(self, messages: Sequence[Json]) -> ChatForm:
        """Return the same request as a chat completion."""
        choice, wanted = self.tool_choice, self.text.get("format") or {"type": "text"}
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
            wanted = {"type": "json_schema", "json_schema": wanted}
        own: Json = {
            "messages": messages,
            "max_tokens": self.max_output_tokens or self.max_tokens,
            "logprobs": self.has_log_probs,
            "tools": chat_forms.as_functions(self.tools, "function", "parameters"),
            "tool_choice": choice,
            "reasoning_effort": self.reasoning.get("effort"),
            "response_format": wanted,
        }
        return ChatForm.model_validate(vars(self) | own)


def from_items(instructions: str | None, items: Any) -> tuple[list[Json], list[str]]:
    """Return input items as messages, and the place in the request of each message's content."""
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise RequestError(key="input", found=items, allowed="a text, or a list of items")
    read: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    places = ["instructions"] * len(read)
    for number, item in enumerate(items):
        new, last = _read_item(item, f"input[{number}]"), read[-1] if read else {"role": None}
        # Thoughts, a text and calls are one answer, as it was drawn.
        if new["role"] == last["role"] == "assistant" and (
            new["tool_calls"] or not (last["content"] or last["tool_calls"])
        ):
            last["tool_calls"] += new["tool_calls"]
            last["reasoning_content"] += new["reasoning_content"]
            last["content"] = new["content"] or last["content"]
        else:
            read.append(new)
            places.append(f"input[{number}].{'output' if new['role'] == 'tool' else 'content'}")
    for answer in (each for each in read if each["role"] == "assistant"):
        answer["reasoning_content"] = "".join(answer["reasoning_content"])
    return read, places


def _read_item(item: Any, where: str) -> Json:
    """Return an item as a message. An answer has lists of calls and thoughts."""
    kind = as_object(item, where).get("type", "message")
    answer: Json = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": []}
    if kind == "message":
        if (role := item.get("role")) not in _ROLES:
            raise RequestError(key=f"{where}.role", found=role, allowed=_ROLES)
        said = {"role": role, "content": item.get("content")}
        return answer | said if role == "assistant" else said
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return answer | {"tool_calls": [call]}
    if kind == "function_call_output":
        called = {"tool_call_id": item.get("call_id")}
        return {"role": "tool", "content": item.get("output"), **called}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        parts = parts if isinstance(parts, list) else [parts]
        texts = [as_text(as_object(part, where).get("text"), where) for part in parts]
        return answer | {"reasoning_content": texts}
    remedy = "send the item itself: this server keeps none" if kind == "item_reference" else ""
    allowed = "message", "function_call", "function_call_output", "reasoning"
    raise RequestError(key=f"{where}.type", found=kind, allowed=allowed, remedy=remedy)


def _named(text: str, places: Sequence[str]) -> str:
    """Return a text that begins with a field of chat completions with the name that it has here."""
    if (found := _NAME.match(text)) is None:
        return text
    return (places[int(found[2])] if found[2] else _NAMES[found[1]]) + text[found.end() :]


router = APIRouter(route_class=chat_routing.route_with(error_body))


@router.post("/responses")
async def responses(request: Request, chats: Chats, context: AnyFront, key: Key) -> Response:
    """Answer input items."""
    form = await chat_forms.read_form(context, request, ResponsesForm)
    messages, places = await asyncio.to_thread(from_items, form.instructions, form.input)
    try:
        question, call = await begin_chat(chats, key, form.as_chat(messages))
    except Exception as error:
        refused = chat_routing.as_http_error(error)
        refused.text = _named(refused.text, places)
        refused.param = refused.param and _named(refused.param, places)
        raise refused from error
    response = _Response(form, question, chats.texts)
    if form.stream:
        events = response.events(GrowingReplies(chats, request, call, question))
        return chat_routing.streamed(events, response.failed, partial(chats.drop, call))
    samples = await chats.result(request, call)
    return await asyncio.to_thread(response.whole, samples)


@router.api_route("/responses/{rest:path}", methods=["GET", "POST", "DELETE"])
@router.api_route("/embeddings", methods=["GET", "POST"])
async def refused(request: Request, context: AnyFront, key: Key) -> Response:
    """Refuse earlier responses, and embeddings."""
    path = request.url.path[:200]
    reason = _NO_EMBEDDINGS if path.endswith("/embeddings") else _KEEPS_NOTHING
    raise HttpError(404, f"{path} is not supported: {reason}")


class _Response:
    """The response to a request, and the events of its stream."""

    def __init__(self, form: ResponsesForm, question: ChatRequest, texts: ChatTexts) -> None:
        self._form, self._question, self._texts = form, question, texts
        self._id = uuid.uuid4().hex
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": int(time.time())}
        nothing: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        self._head = head | {name: getattr(form, name) for name in _ECHOED.split()} | nothing
        self._events, self._ended = 0, 0  # number of events, and of items that have ended
        self._told: list[str] = []  # texts of the items so far

    def whole(self, samples: Samples) -> JSONResponse:
        """Return the response."""
        [reply] = chat_forms.replies(self._texts, self._question, samples)
        return JSONResponse(self._body(reply))

    async def events(self, growing: GrowingReplies) -> AsyncIterator[str]:
        """Yield the events of a stream, item by item."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._head | {"status": "in_progress"})
        thoughts = content = ""
        async for deltas in growing.deltas():
            if not deltas:
                yield ": waiting\n\n"
            elif not growing.replies:  # else the whole items follow
                thoughts += "".join(each.text for each in deltas if each.kind == "thoughts")
                content += "".join(each.text for each in deltas if each.kind == "content")
                for text in self._grow(self._items(ChatAnswer(content, thoughts)), False):
                    yield text
        body = await asyncio.to_thread(self._body, growing.replies[0])
        for text in self._grow(body["output"], True):
            yield text
        yield self._event(body["status"], response=body)

    def failed(self, error: HttpError) -> str:
        """Return the last event of a stream that fails."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        reason = {"code": code, "message": chat_routing.safe_text(error)}
        return self._event("failed", response=self._head | {"status": "failed", "error": reason})

    def _body(self, reply: Reply) -> Json:
        is_whole = reply.is_whole or len(reply.answer.calls) > 0
        body: Json = self._head | {"status": "completed" if is_whole else "incomplete"}
        entries = log_prob_entries(self._texts, reply) if self._form.has_log_probs else []
        body["output"] = self._items(reply.answer, entries)
        body["output"][-1]["status"] = body["status"]
        if self._question.is_held:
            body["masked"] = True
        if not is_whole:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        prompt, ids = self._question.prompt.ids, reply.sampled.tokens.tolist()
        thoughts = chat_forms.thought_tokens(self._texts, reply)
        body["usage"] = {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(ids),
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": len(prompt) + len(ids),
        }
        if self._form.return_token_ids:
            body |= {"prompt_token_ids": prompt, "token_ids": ids}
        return body

    def _items(self, answer: ChatAnswer, log_probs: Sequence[Json] = ()) -> list[Json]:
        """Return an answer as items. A message has the log-probs of all tokens."""
        items: list[Json] = []
        if answer.thoughts:
            part: Json = {"type": "reasoning_text", "text": answer.thoughts}
            head: Json = {"type": "reasoning", "id": f"rs_{self._id}", "summary": []}
            items.append(head | {"content": [part]})
        if answer.content or log_probs or not (answer.calls or items):
            part = {"type": "output_text", "text": answer.content, "annotations": []}
            part["logprobs"] = log_probs
            head = {"type": "message", "id": f"msg_{self._id}", "role": "assistant"}
            items.append(head | {"content": [part]})
        for call in answer.calls:
            head = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id}
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            items.append(head | {"name": call.name, "arguments": arguments})
        return [item | {"status": "completed"} for item in items]

    def _grow(self, items: Sequence[Json], is_whole: bool) -> Iterator[str]:
        """Yield the events of what is new in items that have grown."""
        for index in range(self._ended, len(items)):
            item, at = items[index], {"output_index": index, "item_id": items[index]["id"]}
            [part] = item.get("content", [item])
            is_call, name, stem = part is item, "arguments", "function_call_arguments"
            empty: Json = {"arguments": ""}
            if not is_call:
                name, stem, empty, at["content_index"] = "text", part["type"], {"content": []}, 0
            scored = {each: part[each] for each in ("logprobs",) if each in part}
            if index == len(self._told):
                self._told.append("")
                added = item | {"status": "in_progress"} | empty
                yield self._event("output_item.added", output_index=index, item=added)
                if not is_call:
                    added = part | {"text": ""} | {each: [] for each in scored}
                    yield self._event("content_part.added", **at, part=added)
            more, self._told[index] = part[name][len(self._told[index]) :], part[name]
            if more:
                yield self._event(f"{stem}.delta", **at, delta=more, **scored)
            if is_whole or index + 1 < len(items):
                self._ended += 1
                yield self._event(f"{stem}.done", **at, **{name: part[name]}, **scored)
                if not is_call:
                    yield self._event("content_part.done", **at, part=part)
                yield self._event("output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **data: Any) -> str:
        data = {"type": f"response.{kind}", "sequence_number": self._events, **data}
        self._events += 1
        return chat_routing.event(data, data["type"])
