# .venv/bin/python -m pytest tests/serve/test_chat_routes.py; for the real clients: make chat-env
"""OpenAI's and Anthropic's routes of the service: prompts, log-probs and answers are those of
Hugging Face's template, processor and model, and the real clients understand them."""

import asyncio
import base64
import itertools
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from megatron_vlm.family.qwen.chat import CHAT
from megatron_vlm.serve.http.api_keys import add_key
from megatron_vlm.serve.http.chat_forms import (
    AnthropicForm,
    ApiForm,
    ChatForm,
    CompletionForm,
    check_request_fields,
)
from megatron_vlm.serve.protocol.chat_messages import AnswerStream, cut_at_stop, read_answer
from megatron_vlm.serve.protocol.payloads import RequestError
from tests.support.batches import token_ids
from tests.support.chats import hf_encode, hf_processor
from tests.support.error_fields import raises
from tests.support.pool import free_port
from tests.support.process_tree import ProcessTree
from tests.support.reference import load_reference
from tests.support.serve_client import Client, Running, served
from tests.support.serve_requests import picture
from tests.support.suites import full

pytestmark = pytest.mark.alone  # it starts jobs and kills them

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5  # log-probs in fp32. Measured worst: 1.4e-6


def uri(width: int, height: int, seed: int, kind: str = "png") -> str:
    data = picture(width, height, seed, kind).data
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(width: int, height: int, seed: int, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(width, height, seed, kind)}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "What?"}],
    "a picture": [{"role": "user", "content": [text("What is "), shown(70, 45, 1), text("?")]}],
    "two turns": [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": [shown(60, 60, 2, "webp"), shown(90, 33, 3, "jpeg")]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [text("And "), shown(40, 80, 4, "gif")]},
    ],
    "a tool's picture": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [text("seen: "), shown(50, 50, 5)]},
    ],
    "an answer that continues": [
        {"role": "user", "content": [text("What is "), shown(70, 45, 1)]},
        {"role": "assistant", "content": "It is "},
    ],
}
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def path(tiny) -> str:
    return tiny(vocab=509)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    return file, {name: add_key(name, file) for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def running(
    path: str,
    keys: tuple[Path, dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
    process_tree: ProcessTree,
) -> Iterator[Running]:
    words = f"serve.keys={keys[0]}", "serve.sampling_seconds=0.2"
    folder = tmp_path_factory.mktemp("chats")
    with served(path, folder, free_port(), *words, tree=process_tree) as service:
        yield service


@pytest.fixture(scope="module")
def ann(running: Running, keys: tuple[Path, dict[str, str]]) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {keys[1]['ann']}"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=100) as client:
        yield client


def answer(client: httpx.Client, model: str, messages: Any, **fields: Any) -> Any:
    body = {"model": model, "messages": messages, **fields}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def for_transformers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages in the form of Qwen's templates, with pictures that Pillow opens in
    the same way."""
    changed = []
    for each in messages:
        parts = each["content"]
        if isinstance(parts, list):
            parts = [
                part
                if part["type"] == "text"
                else {"type": "image", "image": part["image_url"]["url"]}
                for part in parts
            ]
        calls = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"x": 1}}}
            for call in each.get("tool_calls", [])
        ]
        role = {"developer": "system"}.get(each["role"], each["role"])
        said = {"role": role, "content": parts or ""}
        changed.append(said | ({"tool_calls": calls} if calls else {}))
    return changed


@pytest.mark.parametrize("name", CHATS)
def test_prompts_and_log_probs_are_those_of_transformers(ann, path: str, name: str) -> None:
    tools = TOOLS if "tool" in name else None
    fields = dict(temperature=0, max_tokens=12, logprobs=True, return_token_ids=True)
    fields |= {"tools": tools} if tools else {}
    is_open = "continues" in name
    fields |= OPEN if is_open else {}
    reply = answer(ann, path, CHATS[name], **fields)
    record = {"messages": for_transformers(CHATS[name]), "tools": tools}
    processor = hf_processor(path)
    inputs = hf_encode(
        processor, record, add_generation_prompt=not is_open, continue_final_message=is_open
    )
    prompt = inputs["input_ids"][0].tolist()
    assert reply["prompt_token_ids"] == prompt
    [choice] = reply["choices"]
    drawn, entries = choice["token_ids"], choice["logprobs"]["content"]
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] == len(drawn)
    ids = torch.tensor([prompt + drawn])
    types = (ids == token_ids().image).int()
    pictures = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
    model = load_reference(path)
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, **pictures).logits[0]
    log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    best = log_probs.clone()
    best[:, [token_ids().image, token_ids().video]] = -torch.inf
    assert best.argmax(-1).tolist() == drawn
    expected = log_probs.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    ours = torch.tensor([entry["logprob"] for entry in entries])
    assert (ours - expected[: len(ours)]).abs().max() < TOLERANCE
    assert len(ours) == len(drawn) - (choice["finish_reason"] == "stop")
    told = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    special = set(processor.tokenizer.all_special_ids)
    if not special & set(drawn[: len(ours)]):
        assert told == choice["message"]["content"]


def test_the_judge_of_the_page_gives_the_probability_of_a_word(
    running: Running, ann, path: str, tmp_path: Path
) -> None:
    """The judge sees each record's picture, and its questions are under way at once."""
    page = (ROOT / "docs" / "rl.md").read_text()
    [program] = re.findall(r"^```python\n(# judge.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = program.replace("http://127.0.0.1:8000", running.url).replace("MODEL", path)
    program = program.replace("timeout=100", f"timeout=100, headers={dict(ann.headers)}")
    records, answers = [], ["red", "left"]
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(picture(70, 45, seed).data)
        records.append({"question": "What?", "right": "red", "image": f"{tmp_path}/{seed}.png"})
    said, pairs = "What?\nRight answer: red\nAnswer: {}\nIs the answer right? Say yes or no.", []
    for seed, answered in itertools.product((1, 2), answers):
        pairs.append(
            [{"role": "user", "content": [shown(70, 45, seed), text(said.format(answered))]}]
        )
    processor, model, likely = hf_processor(path), load_reference(path), []
    for messages in pairs:
        record = {"messages": for_transformers(messages), "tools": None}
        inputs = hf_encode(processor, record, add_generation_prompt=True)
        types = (inputs["input_ids"] == token_ids().image).int()
        with torch.no_grad():
            logits = model(**dict(inputs) | {"mm_token_type_ids": types}).logits[0, -1]
        best = logits.softmax(-1).topk(5)
        words = [each.strip().lower() for each in map(processor.tokenizer.decode, best.indices)]
        likely.append(list(zip(words, best.values.tolist(), strict=True)))
    word = next(word for word, _ in likely[0] if word.isascii() and word.isalpha())
    expected = [sum(share for each, share in five if each == word) for five in likely]
    scope: dict[str, Any] = {}
    exec(program.replace('"yes"', repr(word)), scope)

    async def rewards() -> list[float]:
        async with scope["judge"]:  # to close its connections
            pairs = itertools.product(records, answers)
            return await asyncio.gather(*(scope["score"](*each) for each in pairs))

    assert asyncio.run(rewards()) == pytest.approx(expected, rel=10 * TOLERANCE)
    assert len(set(expected)) > 1


def events_of(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_stream_gives_the_same_answers_in_pieces(ann, path: str) -> None:
    fields = dict(temperature=1, seed=7, n=2, max_tokens=100, stop="zq")
    whole = answer(ann, path, CHATS["two turns"], **fields)
    body = {"model": path, "messages": CHATS["two turns"], "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    reply = ann.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    events = events_of(reply)
    assert len({(each["id"], each["created"]) for each in events}) == 1
    texts, pieces, reasons = ["", ""], [0, 0], {}
    for choice in itertools.chain(*(each["choices"] for each in events)):
        piece = choice["delta"].get("content") or ""
        texts[choice["index"]] += piece
        pieces[choice["index"]] += bool(piece)
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert min(pieces) > 1
    assert list(reasons.values()) == [choice["finish_reason"] for choice in whole["choices"]]
    assert events[-1]["usage"] == whole["usage"]


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat as input items of Responses."""
    items: list[dict[str, Any]] = []
    for each in messages:
        parts, role = each["content"], each["role"]
        if isinstance(parts, list):
            kinds = {"text": "output_text" if role == "assistant" else "input_text"}
            parts = [
                {"type": "input_image", "image_url": part["image_url"]["url"]}
                if part["type"] == "image_url"
                else {**part, "type": kinds["text"]}
                for part in parts
            ]
        if thoughts := each.get("reasoning_content"):
            items.append(
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": thoughts}]}
            )
        if role == "tool":
            items.append(
                {"type": "function_call_output", "call_id": each["tool_call_id"], "output": parts}
            )
        elif parts:
            items.append({"role": role, "content": parts})
        for call in each.get("tool_calls", []):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def flat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", **each["function"], "strict": True} for each in tools]


def responded(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the response and the events of its stream, which is the same in pieces."""
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    stream = client.post("/v1/responses", json={**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    whole, events = reply.json(), events_of(stream)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [f"event: {each['type']}" for each in events] == [
        line for line in stream.text.splitlines() if line.startswith("event: ")
    ]
    made = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}" == f"response.{made['status']}"
    built = grown_items(events)
    assert built == made["output"]
    given = [re.sub("_[0-9a-f]{24,}", "", json.dumps(each)) for each in (whole["output"], built)]
    assert given[0] == given[1] and whole["usage"] == made["usage"]
    return whole, events


def grown_items(events: list[Any]) -> list[Any]:
    """Return the items that the events of a stream make, which come in order."""
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:2] == ["created", "in_progress"]
    items: list[Any] = []
    for kind, each in zip(kinds[2:-1], events[2:-1], strict=True):
        name, _, phase = kind.rpartition(".")
        if kind == "output_item.added":
            assert each["output_index"] == len(items) and each["item"]["status"] == "in_progress"
            items.append(each["item"])
            continue
        item = items[-1]
        assert each["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert each["item"] | {"status": "in_progress"} == item
            items[-1] = each["item"]
            continue
        assert each["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(each["part"])
        elif kind == "content_part.done":
            assert each["part"] == item["content"][0]
        else:
            part = item if "call" in name else item["content"][each["content_index"]]
            field = "arguments" if "call" in name else "text"
            assert name == ("function_call_arguments" if part is item else part["type"])
            if phase == "delta":
                assert each["delta"]
                part[field] += each["delta"]
                if "logprobs" in each:
                    part["logprobs"] += each["logprobs"]
            else:
                assert phase == "done" and each[field] == part[field]
    return items


@pytest.mark.parametrize("name", CHATS)
def test_responses_are_those_of_chat_completions(ann, path: str, name: str) -> None:
    tools = TOOLS if "tool" in name else []
    fields = dict(model=path, temperature=0, return_token_ids=True, top_logprobs=2)
    chat = answer(
        ann,
        messages=CHATS[name],
        max_tokens=12,
        logprobs=True,
        **fields,
        **({"tools": tools} if tools else {}),
    )
    body = dict(input=as_items(CHATS[name]), tools=flat(tools), max_output_tokens=12, **fields)
    whole, _ = responded(ann, body | {"include": ["message.output_text.logprobs"]})
    [choice] = chat["choices"]
    [item] = whole["output"]
    assert whole["prompt_token_ids"] == chat["prompt_token_ids"]
    assert whole["token_ids"] == choice["token_ids"]
    assert item["content"][0]["text"] == choice["message"]["content"]
    ours, theirs = item["content"][0]["logprobs"], choice["logprobs"]["content"]
    assert [each["bytes"] for each in ours] == [each["bytes"] for each in theirs]
    assert [each["logprob"] for each in ours] == pytest.approx(
        [each["logprob"] for each in theirs], abs=TOLERANCE
    )
    assert {len(each["top_logprobs"]) for each in ours} == {2}
    usage = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    usage["total_tokens"] = "total_tokens"
    assert {name: whole["usage"][own] for name, own in usage.items()} == chat["usage"]
    is_cut = choice["finish_reason"] == "length"
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert (whole["incomplete_details"] == {"reason": "max_output_tokens"}) == is_cut


def test_a_response_streams_piece_by_piece(ann, path: str) -> None:
    """Its instructions are the system's message, and what a client may send beside them changes
    nothing."""
    system, *rest = CHATS["two turns"]
    fields = dict(temperature=1, seed=7, stop="zq")
    [choice] = answer(ann, path, CHATS["two turns"], max_tokens=100, **fields)["choices"]
    body = dict(model=path, instructions=system["content"], input=as_items(rest), store=True)
    body |= {"max_output_tokens": 100, "metadata": {"a": "b"}, "user": "me", **fields}
    whole, events = responded(ann, body)
    assert whole["output"][0]["content"][0]["text"] == choice["message"]["content"]
    assert sum(each["type"] == "response.output_text.delta" for each in events) > 1
    assert whole["metadata"] == {"a": "b"} and whole["instructions"] == system["content"]
    body = {"model": path, "input": "What?", "max_output_tokens": 2, "temperature": 0}
    whole, _ = responded(ann, body)
    asked = [{"role": "user", "content": "What?"}]
    usage = answer(ann, path, asked, max_tokens=2)["usage"]
    assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("layout", [full("parallel.tp=2"), full("parallel.pp=2")])
def test_layouts_answer_alike(
    path: str, layout: str, tmp_path: Path, process_tree: ProcessTree
) -> None:
    with (
        served(path, tmp_path / "run", free_port(), layout, tree=process_tree) as service,
        httpx.Client(base_url=service.url, timeout=100) as client,
    ):
        test_prompts_and_log_probs_are_those_of_transformers(client, path, "two turns")
        test_a_stream_gives_the_same_answers_in_pieces(client, path)


@pytest.mark.parametrize("echo", [False, True])
def test_completions_are_streamed_in_pieces(ann, path: str, echo: bool) -> None:
    """Thoughts and calls of a chat are text here."""
    prompts = ["<think>\nWhat", [5, 6, 7]]
    body = dict(model=path, prompt=prompts, max_tokens=60, n=2, seed=7, stop="zq", echo=echo)
    whole = ann.post("/v1/completions", json=body).json()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    reply = ann.post("/v1/completions", json=body | more)
    assert reply.text.endswith("data: [DONE]\n\n")
    events, texts, pieces, reasons = events_of(reply), [""] * 4, [0] * 4, {}
    for choice in itertools.chain(*(each["choices"] for each in events)):
        texts[choice["index"]] += choice["text"]
        pieces[choice["index"]] += bool(choice["text"])
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert max(pieces) >= 1 + echo  # at least one of the prompt, and one of the answer
    assert list(reasons.values()) == [choice["finish_reason"] for choice in whole["choices"]]
    assert events[-1]["usage"] == whole["usage"]


def test_a_bias_and_a_least_length_decide_and_log_probs_stay_the_models(ann, path: str) -> None:
    end = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|im_end|>")
    fields = dict(temperature=0, max_tokens=6, logprobs=True, return_token_ids=True)
    fields |= {"logit_bias": {str(end): 90, "300": 60}, "min_tokens": 3}
    [choice] = answer(ann, path, CHATS["text"], **fields)["choices"]
    assert choice["token_ids"] == [300, 300, 300, end] and choice["finish_reason"] == "stop"
    assert max(each["logprob"] for each in choice["logprobs"]["content"]) < -2
    more = {"presence_penalty": 2, "frequency_penalty": 2, "logit_bias": {"300": 3}}
    [choice] = answer(ann, path, CHATS["text"], **fields | more)["choices"]
    assert choice["token_ids"][0] == 300 and choice["token_ids"][1] != 300


def test_the_likeliest_of_several_completions_is_returned(ann, path: str) -> None:
    body = dict(model=path, prompt=[5, 6, 7], max_tokens=5, seed=3, logprobs=0)
    drawn = ann.post("/v1/completions", json=body | {"n": 4}).json()["choices"]
    best = ann.post("/v1/completions", json=body | {"n": 2, "best_of": 4}).json()
    values = [each["logprobs"]["token_logprobs"] for each in drawn]
    order = sorted(range(4), key=lambda place: -sum(values[place]) / len(values[place]))
    assert [each["text"] for each in best["choices"]] == [drawn[n]["text"] for n in order[:2]]
    assert best["usage"]["completion_tokens"] == sum(map(len, values))


def test_anthropics_blocks_have_the_tokens_of_openais(ann, path: str) -> None:
    """With the fields that Claude Code 2.1.197 sends."""
    mark = {"cache_control": {"type": "ephemeral"}}
    source = {"type": "text", "media_type": "text/plain", "data": "Red is red."}
    document = {"type": "document", "source": source, "title": "Colours", **mark}
    messages = [
        {"role": "user", "content": [document, text("What?") | mark]},
        {"role": "system", "content": "Tools: none."},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("It")]},
    ]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = {
        **{"model": path, "max_tokens": 3, "messages": messages, "system": [text("S.") | mark]},
        **{"thinking": {"type": "adaptive"}, "context_management": {"edits": edits}},
        **{"output_config": {"effort": "high"}, "metadata": {"user_id": "a"}, "stream": False},
    }
    same = [
        {"role": "system", "content": [text("S.")]},
        {"role": "user", "content": [text("Colours\nRed is red."), text("What?")]},
        {"role": "user", "content": "Tools: none."},
        {"role": "assistant", "content": [text("It")]},
    ]
    prompt = answer(ann, path, same, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    counted = ann.post("/v1/messages/count_tokens?beta=true", json=body).json()
    assert counted == {"input_tokens": len(prompt)}
    reply = ann.post("/v1/messages?beta=true", json=body)
    assert reply.status_code == 200 and reply.json()["usage"]["input_tokens"] == len(prompt)
    for wrong in ({"output_config": {"format": {"a": 1}}}, {"context_management": {"edits": [{}]}}):
        refused = ann.post("/v1/messages", json=body | wrong)
        assert refused.status_code == 400 and next(iter(wrong)) in refused.text


SIDE = {"type": "string", "enum": ["left", "right"]}
SCHEMA = {"type": "object", "properties": {"side": SIDE}, "required": ["side"]}
SCHEMA |= {"additionalProperties": False}
TURN = [{"type": "function", "function": {"name": "turn", "parameters": SCHEMA}}]
HELD: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "choice": {"guided_choice": ["left", 'a "/']},
    "regex": {"structured_outputs": {"regex": "(left|a/)[0-9]{2}"}},
    "call": {"tools": TURN, "tool_choice": {"type": "function", "function": {"name": "turn"}}},
}


def keeps(name: str, message: dict[str, Any]) -> bool:
    """Return whether an answer keeps to what it is held to."""
    if name == "call":
        [call] = message["tool_calls"]
        message = {"content": call["function"]["arguments"]}
        assert not message["content"] or call["function"]["name"] == "turn"
    said = message["content"]
    if name in ("schema", "call"):
        return json.loads(said).keys() == {"side"} and json.loads(said)["side"] in SIDE["enum"]
    return bool(re.fullmatch("(left|a/)[0-9]{2}", said)) or said in HELD["choice"]["guided_choice"]


@pytest.mark.parametrize("name", HELD)
def test_answers_keep_to_what_they_are_held_to(ann, path: str, name: str) -> None:
    """With the model's own log-probs, whole and streamed, and the same beside others."""
    fields = dict(temperature=1, seed=5, n=3, max_tokens=400, **HELD[name])
    scored = dict(logprobs=True, return_token_ids=True)
    whole = answer(ann, path, CHATS["text"], **fields, **scored)
    model = load_reference(path)
    for choice in whole["choices"]:
        assert choice["masked"] and choice["finish_reason"] in ("stop", "tool_calls")
        assert keeps(name, choice["message"])
        drawn, prompt = choice["token_ids"], whole["prompt_token_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        ours = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
        assert (ours - expected[: len(ours)]).abs().max() < TOLERANCE
    assert "masked" not in answer(ann, path, CHATS["text"], max_tokens=2)["choices"][0]
    body = {"model": path, "messages": CHATS["text"], "stream": True, **fields}
    events = events_of(ann.post("/v1/chat/completions", json=body))
    for place, choice in enumerate(whole["choices"]):
        mine = [c for each in events for c in each["choices"] if c["index"] == place]
        told = "".join(c["delta"].get("content") or "" for c in mine)
        assert told == (choice["message"]["content"] or "") and mine[-1]["masked"]


def test_other_routes_hold_answers(ann, path: str) -> None:
    body = dict(model=path, max_tokens=400, messages=[{"role": "user", "content": "Where?"}])
    held = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    [block] = ann.post("/v1/messages", json=body | held).json()["content"]
    assert json.loads(block["text"])["side"] in SIDE["enum"]
    tool = {"name": "turn", "input_schema": SCHEMA}
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "turn"},
    ):
        reply = ann.post(
            "/v1/messages", json=body | {"tools": [tool], "tool_choice": choice}
        ).json()
        assert reply["stop_reason"] == "tool_use"
        assert reply["content"][0]["input"]["side"] in SIDE["enum"]
    held = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    item = ann.post("/v1/responses", json={"model": path, "input": "Where?", **held}).json()
    [part] = item["output"][-1]["content"]
    assert json.loads(part["text"])["side"] in SIDE["enum"] and item["masked"]
    fields = dict(model=path, prompt="Where?", max_tokens=9, guided_choice=["left", "right"])
    [choice] = ann.post("/v1/completions", json=fields).json()["choices"]
    assert choice["text"] in ("left", "right") and choice["masked"]


def test_completions_score_their_prompts(ann, path: str) -> None:
    prompt = [5, 6, 7, 300, 8]
    body = dict(model=path, prompt=[prompt, [9, 9]], max_tokens=1, echo=True, logprobs=1)
    reply = ann.post("/v1/completions", json={**body, "temperature": 0, "seed": 1}).json()
    first, second = (choice["logprobs"] for choice in reply["choices"])
    assert first["token_logprobs"][0] is None and first["top_logprobs"][0] is None
    model = load_reference(path)
    with torch.no_grad():
        log_probs = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = log_probs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    ours = torch.tensor(first["token_logprobs"][1 : len(prompt)])
    assert (ours - expected).abs().max() < TOLERANCE
    likeliest = [max(each.values()) for each in first["top_logprobs"][1 : len(prompt)]]
    assert (torch.tensor(likeliest) - log_probs[:-1].max(-1).values).abs().max() < TOLERANCE
    assert len(second["token_logprobs"]) == 3
    assert first["text_offset"] == [
        sum(map(len, first["tokens"][:place])) for place in range(len(first["tokens"]))
    ]
    scored = ann.post("/v1/completions", json={**body, "prompt": prompt, "max_tokens": 0}).json()
    assert scored["choices"][0]["logprobs"]["tokens"] == first["tokens"][:-1]
    ended = {**body, "prompt": prompt, "temperature": 0, "stop": first["tokens"][-1]}
    [choice] = ann.post("/v1/completions", json=ended).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["logprobs"]["tokens"] == first["tokens"]


def test_a_snapshot_answers_while_its_model_trains(
    running: Running, ann, path: str, keys: tuple[Path, dict[str, str]]
) -> None:
    with Client(running.url, path, key=keys[1]["ann"]) as client:
        model = client.model(rank=4, seed=3)

        def step() -> None:
            inputs = {"target_tokens": [3, 4, 5, 6], "weights": [1.0] * 4}
            model.ask_gradients([([[2, 3, 4, 5]], inputs)])
            model.step(learning_rate=0.1)

        step()
        saved = client.do(
            "save_weights_for_sampler", model_id=model.id, seq_id=next(model.seq), path="one"
        )["path"]
        ask = dict(temperature=0, max_tokens=4, logprobs=True)
        before = answer(ann, saved, CHATS["text"], **ask)["choices"]
        step()
        named = f"{path};{saved}"
        assert answer(ann, named, CHATS["text"], **ask)["choices"] == before
        assert answer(ann, path, CHATS["text"], **ask)["choices"] != before
        listed = {each["id"] for each in ann.get("/v1/models").json()["data"]}
        assert {path, saved} <= listed
        assert ann.get(f"/v1/models/{saved}").json()["id"] == saved
        [plain] = [each for each in listed if each.endswith(".one") and not set("/:") & set(each)]
        assert ann.get(f"/v1/models/{plain}").json()["id"] == plain
        assert answer(ann, plain, CHATS["text"], **ask)["choices"] == before
        other = {"Authorization": "", "X-API-Key": keys[1]["bob"]}
        for name in (saved, plain):
            body = {"model": name, "messages": CHATS["text"]}
            refused = ann.post("/v1/chat/completions", json=body, headers=other)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
            counted = ann.post("/v1/messages/count_tokens", json=body, headers=other)
            assert counted.json()["error"]["type"] == "not_found_error"


SLOW = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(40)]


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


BROKEN = base64.b64encode(b"no picture").decode()
REFUSALS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no messages": ({"messages": []}, "messages", "a list of one message or more"),
    "role": ({"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role", "narrator"),
    "answer": (
        {"messages": [{"role": "assistant", "content": "a"}], "add_generation_prompt": True},
        "add_generation_prompt",
        "give false",
    ),
    "no answer": ({"continue_final_message": True}, "continue_final_message", "give false"),
    "calls": (
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        "add the results",
    ),
    "near": ({"temprature": 1}, "temprature", "write temperature"),
    "neutral": ({"echo": True}, "echo", "give false, or leave it out"),
    "never neutral": (
        {"chat_template": "a"},
        "chat_template",
        "chat_template=a is not supported; leave",
    ),
    "address": (
        {"messages": [said({"type": "image_url", "image_url": "http://a"})]},
        "messages[0].content[0].image_url",
        "opens no addresses",
    ),
    "file": (
        {"messages": [said({"type": "image_url", "image_url": "/etc/passwd"})]},
        "messages[0].content[0].image_url",
        "opens no addresses",
    ),
    "base64": (
        {"messages": [said({"type": "image_url", "image_url": "data:image/png;base64,%%"})]},
        "messages[0].content[0].image_url",
        "is not base64",
    ),
    "picture": (
        {"messages": [said({"type": "image_url", "image_url": f"data:;base64,{BROKEN}"})]},
        None,
        "is not an image that can be opened",
    ),
    "video": (
        {"messages": [said({"type": "video_url", "video_url": "data:"})]},
        "messages[0].content[0].type",
        "video_url",
    ),
    "bias": ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
    "no id": ({"logit_bias": {"5000": 1}}, None, "logit_bias[0]=5000 is not one of"),
    "length": ({"min_tokens": 9, "max_tokens": 8}, None, "min_tokens=9"),
    "length and stop": ({"min_tokens": 1, "stop": "a"}, None, "0 with stop strings"),
    "format": ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    "schema": ({"guided_json": {"type": "colour"}}, "guided_json", "Invalid type: colour"),
    "automata": ({"guided_json": {"allOf": SLOW}}, "guided_json", "too much work"),
    "choices": ({"guided_choice": [f"{n:05}" for n in range(5000)]}, None, "allows no token"),
    "choice": ({"tool_choice": "required"}, "tool_choice", "of one of []"),
    "single": ({"tools": TOOLS, "parallel_tool_calls": False}, "tool_choice", "single call"),
    "tops": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "room": ({"max_tokens": 10**7}, "max_tokens", "10000000"),
    "n": ({"n": 10**6}, "num_samples", "limit num_samples"),
    "variable": ({"chat_template_kwargs": {"colour": 1}}, None, "does not read it"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_named(ann, path: str, name: str) -> None:
    fields, param, words = REFUSALS[name]
    body = {"model": path, "messages": CHATS["text"], **fields}
    reply = ann.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"], error
    if param is not None:
        assert error["param"] == param
    assert ("context_length" in (error["code"] or "")) == (name == "room")


# The fields that the SDKs of OpenAI (3.57) and Anthropic (2.14, with its beta) have.
FIELDS: dict[type[ApiForm], tuple[str, str, str]] = {
    ChatForm: (
        "frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages model n "
        "parallel_tool_calls presence_penalty reasoning_effort response_format seed stop stream "
        "stream_options temperature tool_choice tools top_logprobs top_p",
        "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
        "service_tier store user verbosity",
        "audio function_call functions modalities moderation prediction web_search_options",
    ),
    CompletionForm: (
        "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty "
        "prompt seed stop stream stream_options temperature top_p",
        "user",
        "suffix",
    ),
    AnthropicForm: (
        "max_tokens messages model output_config stop_sequences stream system temperature thinking "
        "tool_choice tools top_k top_p",
        "betas billing_policy cache_control diagnostics inference_geo metadata service_tier speed "
        "user_profile_id workspace_id",
        "compaction container context_management fallback_credit_token fallbacks mcp_servers "
        "thread",
    ),
}


@pytest.mark.parametrize("form", FIELDS)
def test_a_field_is_carried_out_or_ignored_by_a_list_or_refused(form: type[ApiForm]) -> None:
    carried_out, ignored, refused = map(str.split, FIELDS[form])
    assert form.model_fields.keys() >= {*carried_out}
    check_request_fields(dict.fromkeys(carried_out + ignored, "odd"), form.model_fields.keys())
    for name in refused:
        with raises(RequestError, key=name):
            check_request_fields({"model": "a", name: "odd"}, form.model_fields.keys())


USER = {"role": "user", "content": "What?"}
KEPT = "send the items"
REFUSED_ITEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({"input": []}, "input", "a text, or a list of items"),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "developer"),
    "type": ({"input": [USER, {"type": "computer_call"}]}, "input[1].type", "computer_call"),
    "reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "itself"),
    "file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
        "input[0].content[0].type",
        "input_file",
    ),
    "address": (
        {
            "instructions": "See.",
            "input": [
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_image", "image_url": "http://a"}],
                },
            ],
        },
        "input[2].output[0].image_url",
        "opens no addresses",
    ),
    "thoughts": ({"input": [{"type": "reasoning", "summary": "a"}]}, "input[0]", "an object"),
    "earlier": ({"previous_response_id": "resp_a"}, "previous_response_id", KEPT),
    "conversation": ({"conversation": "a"}, "conversation", KEPT),
    "template": ({"prompt": {"id": "a"}}, "prompt", KEPT),
    "later": ({"background": True}, "background", "False"),
    "truncation": ({"truncation": "auto"}, "truncation", "disabled"),
    "n": ({"n": 2}, "n", "1"),
    "search": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    "choice": ({"tool_choice": "required"}, "tool_choice", "of one of []"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    "room": ({"max_output_tokens": 10**7}, "max_output_tokens", "10000000"),
    "sources": ({"include": ["file_search_call.results"]}, "include", "logprobs"),
    "bias": ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
}


@pytest.mark.parametrize("name", REFUSED_ITEMS)
def test_a_mistake_in_an_item_is_named(ann, path: str, name: str) -> None:
    fields, param, words = REFUSED_ITEMS[name]
    reply = ann.post("/v1/responses", json={"model": path, "input": "What?", **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"], error
    assert error["param"] == param and error["message"].startswith(param), error


def test_what_the_service_does_not_have_is_refused_by_name(ann) -> None:
    for path, words in (("responses/resp_a", KEPT), ("embeddings", "--runner pooling")):
        for reply in (ann.get(f"/v1/{path}"), ann.post(f"/v1/{path}", json={})):
            assert reply.status_code == 404, reply.text
            assert reply.json()["error"]["type"] == "not_found_error"
        assert words in reply.json()["error"]["message"]
    assert ann.get("/v1/responses/a", headers={"Authorization": ""}).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_frees_the_rows(ann, path: str, stream: bool) -> None:
    """Their answers would take minutes, and leave the rows soon after. Each call is done once."""
    failed = 'calls_done_total{kind="asample",outcome="failed"'
    before = figure(ann, failed)
    # The most likely tokens repeat themselves without an end.
    body = {"model": path, "messages": CHATS["a picture"], "max_tokens": 20_000, "stream": stream}
    body["temperature"] = 0
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            if not stream:
                ann.post("/v1/chat/completions", json=body, timeout=0.5)
            with ann.stream("POST", "/v1/chat/completions", json=body, timeout=100) as reply:
                for line in reply.iter_lines():
                    if '"content":' in line and '"content":""' not in line:
                        raise httpx.ReadTimeout("read enough")
    while under_way(ann) or figure(ann, failed) < before + 2:
        time.sleep(0.05)
    assert answer(ann, path, CHATS["text"], max_tokens=2)["usage"]["completion_tokens"] <= 2
    accepted, done = (figure(ann, f'calls_{name}_total{{kind="asample"') for name in WHEN)
    assert accepted == done


WHEN = ("accepted", "done")


def under_way(client: httpx.Client) -> int:
    return figure(client, "samples_under_way ")


def figure(client: httpx.Client, name: str) -> int:
    """Return a figure of the metrics, over all of its labels."""
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"megatron_vlm_{name}")]
    assert found or "{" in name  # a label that was not met yet
    return int(sum(float(line.split(" ")[-1]) for line in found))


THINKING = "<think>\nHm, 3 < 4.\n</think>\n\nFour."
XML = (
    "<tool_call>\n<function=look>\n<parameter=x>\n3\n</parameter>\n"
    "<parameter=name>\n7\n</parameter>\n</function>\n</tool_call>"
)


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


TYPED = [{"function": {"name": "look", "parameters": {"properties": {"name": {"type": "string"}}}}}]
ANSWERS = {
    "text": ("Four.", False, None, ("Four.", None, [])),
    "thoughts": (THINKING, False, None, ("Four.", "Hm, 3 < 4.", [])),
    "opened": ("Hm.\n</think>\n\nFour.", True, None, ("Four.", "Hm.", [])),
    "cut in thoughts": ("Hm, 3 <", True, None, ("", "Hm, 3 <", [])),
    "json": (
        'So:\n<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>',
        False,
        TYPED,
        ("So:", None, [("look", {"x": 3})]),
    ),
    "xml": (XML, False, TYPED, ("", None, [("look", {"x": 3, "name": "7"})])),
    "two calls": (
        XML + "\n" + XML,
        False,
        TYPED,
        ("", None, [("look", {"x": 3, "name": "7"})] * 2),
    ),
    "no call": (
        "<tool_call>\n{x}\n</tool_call>",
        False,
        TYPED,
        ("<tool_call>\n{x}\n</tool_call>", None, []),
    ),
    "no tools": (XML, False, None, (XML, None, [])),
    "space before a call": (
        "\nSo: " + XML,
        False,
        TYPED,
        ("\nSo:", None, [("look", {"x": 3, "name": "7"})]),
    ),
    **{
        name: (block, False, TYPED, (block, None, []))
        for name, block in {
            "a second call that is cut": XML + "\n<tool_call>\n<function=look>",
            "a parameter that is not closed": XML.replace("</parameter>\n</", "</"),
            "text beside parameters": XML.replace("<parameter=x>", "so <parameter=x>"),
            "no number of JSON": called('{"x": NaN}'),
            "a number out of range": called('{"x": 1e999}'),
            "half of a character": called('{"x": "\\ud800"}'),
            "too deep": called('{"x": ' + "[" * 10_000 + "]" * 10_000 + "}"),
            "no arguments": called("[3]"),
            "no name": called("{}").replace("look", ""),
        }.items()
    },
    "characters": ("äöü 你好 🙂 end", False, None, ("äöü 你好 🙂 end", None, [])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_parts_and_grows_without_taking_back(name: str) -> None:
    whole, is_thinking, tools, (content, thoughts, calls) = ANSWERS[name]
    read = read_answer(CHAT, whole, is_thinking, tools)
    assert (read.content, read.thoughts) == (content, thoughts)
    assert [(call.name, call.arguments) for call in read.calls] == calls
    choose, raw = random.Random(0), whole.encode()
    for _ in range(20):
        places = sorted(choose.sample(range(len(raw)), min(6, len(raw) - 1)))
        stream, told = AnswerStream(CHAT, is_thinking, tools, ["zq"]), ("", "")
        parts = [stream.advance(raw[:place].decode(errors="replace")) for place in places]
        for part in [*parts, stream.end(read)]:
            assert "\ufffd" not in "".join(part)
            told = told[0] + part[0], told[1] + part[1]
        assert told == (thoughts or "", content)


def test_a_stop_string_never_shows() -> None:
    stops, whole, told = ["zqa", "b b"], "az zq b bzqa", ""
    stream = AnswerStream(CHAT, False, None, stops)
    for place in range(len(whole) + 1):
        told += stream.advance(whole[:place])[1]
        assert "az zq ".startswith(told)
    text, stop = cut_at_stop(whole, stops)
    assert (text, stop) == ("az zq ", "b b")
    assert told + stream.end(read_answer(CHAT, text, False, None))[1] == text


@pytest.mark.slow
@pytest.mark.engine("chat")
def test_the_real_clients_understand_it(
    running: Running, ann, path: str, keys: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(CHATS["two turns"]))
    words = [running.url, path, str(file), keys[1]["ann"]]
    done = subprocess.run(
        [ROOT / ".venv-chat" / "bin" / "python", "tests/support/chat_clients/clients.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    fields = dict(temperature=0, max_tokens=24, logprobs=True, top_logprobs=2)
    own = answer(ann, path, CHATS["two turns"], **fields)
    [choice], usage = own["choices"], own["usage"]
    said, counts = (
        choice["message"]["content"],
        [usage["prompt_tokens"], usage["completion_tokens"]],
    )
    seen = got["openai"]
    assert path in seen["models"] and seen["one"] == path
    assert seen["text"] == seen["streamed"] == said
    entries = choice["logprobs"]["content"]
    # Other requests of the same pass change the last digits.
    expected = [each["logprob"] for each in entries]
    assert seen["log_probs"] == pytest.approx(expected, abs=TOLERANCE)
    assert seen["bytes"] == [each["bytes"] for each in entries]
    assert set(seen["tops"]) == {2}
    assert seen["usage"] == seen["stream_usage"] == counts
    assert seen["ends"] == choice["finish_reason"]
    assert seen["two"] == seen["again"] and len(set(seen["two"])) == 2
    assert seen["scored"][0] is None and len(seen["scored"]) == 5
    assert seen["errors"] == {
        "model": ["NotFoundError", "not_found_error"],
        "field": ["BadRequestError", "invalid_request_error"],
        "room": ["BadRequestError", "invalid_request_error"],
        "range": ["BadRequestError", "invalid_request_error"],
        "key": ["AuthenticationError", "authentication_error"],
    }
    seen = got["responses"]
    assert seen["text"] == seen["streamed"] == said
    assert seen["log_probs"] == pytest.approx(expected, abs=TOLERANCE)
    assert seen["usage"] == counts and seen["tools"] == ["look"]
    assert seen["status"] == {"length": "incomplete", "stop": "completed"}[choice["finish_reason"]]
    assert seen["kinds"] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        f"response.{seen['status']}",
    ]
    assert seen["errors"] == {
        "model": ["NotFoundError", "not_found_error"],
        "earlier": ["BadRequestError", "invalid_request_error"],
        "search": ["BadRequestError", "invalid_request_error"],
        "kept": ["NotFoundError", "not_found_error"],
        "vectors": ["NotFoundError", "not_found_error"],
    }
    seen = got["anthropic"]
    assert seen["text"] == seen["streamed"] == said
    assert seen["usage"] == counts and seen["count"] == counts[0]
    assert seen["reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    assert seen["kinds"][0] == "message_start" and seen["kinds"][-1] == "message_stop"
    assert seen["errors"] == {
        "model": ["NotFoundError", "not_found_error"],
        "address": ["BadRequestError", "invalid_request_error"],
    }
    assert set(got["langchain"].values()) == {said}
