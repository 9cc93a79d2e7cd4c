"""The real clients of OpenAI's and Anthropic's APIs and LangChain's against the service: what each
of them gets, as JSON on standard output. Arguments: the address, the model, a file with messages in
OpenAI's form, and the key."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

URL, MODEL, FILE, KEY = sys.argv[1:]
MESSAGES = json.loads(Path(FILE).read_text())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def block(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of OpenAI's as Anthropic's."""
    if part["type"] == "text":
        return part
    head, _, data = part["image_url"]["url"].partition(",")
    kind = head.removeprefix("data:").removesuffix(";base64")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def error(call: Callable[[], Any]) -> list[Any]:
    try:
        call()
    except (openai.APIStatusError, anthropic.APIStatusError) as raised:
        body: Any = raised.body
        return [type(raised).__name__, body.get("error", body).get("type")]
    return ["none"]


def openai_answers() -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    stream = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    pieces = [choice.delta.content or "" for each in events for choice in each.choices]
    two = client.chat.completions.create(**{**CHAT, "temperature": 1}, n=2, seed=5, tools=TOOLS)
    again = client.chat.completions.create(**{**CHAT, "temperature": 1}, n=2, seed=5, tools=TOOLS)
    scored = client.completions.create(
        model=MODEL, prompt=[[5, 6, 7, 8]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    wrong = {
        "model": {"model": "nobody/nothing"},
        "field": {"extra_body": {"guided_json": "a"}},
        "room": {"max_tokens": 10**7},
        "range": {"top_p": 3},
    }
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="tml-other", max_retries=0)
    return {
        "models": [each.id for each in client.models.list()],
        "one": client.models.retrieve(MODEL).id,
        "text": whole.choices[0].message.content,
        "log_probs": [each.logprob for each in whole.choices[0].logprobs.content],
        "bytes": [each.bytes for each in whole.choices[0].logprobs.content],
        "tops": [len(each.top_logprobs) for each in whole.choices[0].logprobs.content],
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(pieces),
        "stream_usage": [events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens],
        "ends": [each.choices[0].finish_reason for each in events if each.choices][-1],
        "two": [choice.message.content for choice in two.choices],
        "again": [choice.message.content for choice in again.choices],
        "scored": scored.choices[0].logprobs.token_logprobs,
        "errors": {
            name: error(lambda more=more: client.chat.completions.create(**{**CHAT, **more}))
            for name, more in wrong.items()
        }
        | {"key": error(lambda: stranger.models.list())},
    }


def item(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as an input item of Responses."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in message["content"]
    ]
    return {**message, "content": parts}


def responses_answers() -> dict[str, Any]:
    """Validate each response and each event, which the client by itself does not."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    function = {"type": "function", **TOOLS[0]["function"], "strict": False}
    body: dict[str, Any] = {
        "model": MODEL,
        "input": [item(each) for each in MESSAGES],
        "max_output_tokens": 24,
        "temperature": 0,
        "metadata": {"a": "b"},
    }
    scored: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**body, **scored)
    offered = client.responses.create(**body, tools=[function], store=False)
    raw: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [each.to_dict(mode="json") for each in client.responses.create(**body, stream=True)]
    for each in events:
        raw.validate_python(each, strict=True)
    for each in (whole, offered):
        Response.model_validate(each.to_dict(mode="json"), strict=True)
    with client.responses.stream(**body) as stream:
        pieces = [each.delta for each in stream if each.type == "response.output_text.delta"]
    wrong = {
        "model": {"model": "nobody/nothing"},
        "earlier": {"previous_response_id": "resp_a"},
        "search": {"tools": [{"type": "web_search"}]},
    }
    return {
        "text": whole.output_text,
        "log_probs": [each.logprob for each in whole.output[0].content[0].logprobs],
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "status": whole.status,
        "tools": [each.name for each in offered.tools],
        "streamed": "".join(pieces),
        "kinds": list(dict.fromkeys(each["type"] for each in events)),
        "errors": {
            name: error(lambda more=more: client.responses.create(**{**body, **more}))
            for name, more in wrong.items()
        }
        | {"kept": error(lambda: client.responses.retrieve("resp_a"))}
        | {"vectors": error(lambda: client.embeddings.create(model=MODEL, input="a"))},
    }


def anthropic_answers() -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    [system, *rest] = MESSAGES
    said = [
        {**each, "content": [block(part) for part in each["content"]]}
        if isinstance(each["content"], list)
        else each
        for each in rest
    ]
    fields: dict[str, Any] = {"model": MODEL, "messages": said, "system": system["content"]}
    whole = client.messages.create(**fields, max_tokens=24, extra_body={"temperature": 0})
    with client.messages.stream(**fields, max_tokens=24, extra_body={"temperature": 0}) as stream:
        kinds = [each.type for each in stream]
        streamed = stream.get_final_message()
    count = client.messages.count_tokens(**fields)
    address = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    wrong = {
        "model": {"model": "nobody/nothing"},
        "address": {"messages": [{"role": "user", "content": [address]}]},
    }
    return {
        "text": whole.content[0].text,
        "streamed": streamed.content[0].text,
        "reason": whole.stop_reason,
        "kinds": list(dict.fromkeys(kinds)),
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "count": count.input_tokens,
        "errors": {
            name: error(
                lambda more=more: client.messages.create(max_tokens=4, **{**fields, **more})
            )
            for name, more in wrong.items()
        },
    }


def langchain_answers() -> dict[str, Any]:
    model = ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=24, max_retries=0
    )
    asked = model.model_copy(update={"use_responses_api": True})
    return {
        "text": model.invoke(MESSAGES).content,
        "streamed": "".join(str(piece.content) for piece in model.stream(MESSAGES)),
        "responses": asked.invoke(MESSAGES).text,
        "responses_streamed": "".join(piece.text for piece in asked.stream(MESSAGES)),
    }


print(
    json.dumps(
        {
            "openai": openai_answers(),
            "responses": responses_answers(),
            "anthropic": anthropic_answers(),
            "langchain": langchain_answers(),
        }
    )
)
