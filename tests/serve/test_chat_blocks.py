# .venv/bin/python -m pytest tests/serve/test_chat_blocks.py
"""Thoughts and calls of tools in answers of the chat routes, drawn as real tokens by a model that
the service has taught them: their parts in both APIs, whole and streamed, and the way back into
the next prompt, which has the very tokens that were drawn."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.serve.test_chat_routes import answer, as_items, events_of, flat, responded
from tests.support.pool import free_port
from tests.support.process_tree import ProcessTree
from tests.support.serve_client import Client, served
from tests.support.serve_requests import picture
from tests.support.taught import END, prompt_ids, teach

pytestmark = pytest.mark.alone  # it starts jobs and kills them

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "tests" / "support" / "templates"
PAGE = ROOT / "docs" / "serve-chats.md"
PROPERTIES = {
    "x": {"type": "integer"},
    "name": {"type": "string"},
    "round": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
]


@dataclass(frozen=True)
class Saying:
    """An answer as it is drawn, and the parts that a client is to get."""

    drawn: str
    content: str
    thoughts: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


def json_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


def xml_call(**arguments: str) -> str:
    inner = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()
    )
    return f"<tool_call>\n<function=look>\n{inner}</function>\n</tool_call>"


BROKEN = "<tool_call>\n<function=look>\n<parameter=x>\n3\n</function>\n</tool_call>"
SAYINGS = {
    "qwen3_vl": {
        "thoughts": Saying("<think>\nHm, 3 < 4.\n</think>\n\nFour.", "Four.", "Hm, 3 < 4."),
        "call": Saying(
            "So:\n" + json_call('{"x": 3, "name": "é\\n7"}'),
            "So:",
            calls=[{"x": 3, "name": "é\n7"}],
        ),
        "two calls": Saying(
            json_call('{"x": 3}') + "\n" + json_call("{}"), "", calls=[{"x": 3}, {}]
        ),
        "no call": Saying(
            'Or:\n<tool_call>\n{"x"}\n</tool_call>', 'Or:\n<tool_call>\n{"x"}\n</tool_call>'
        ),
        "special": Saying("A<|box_start|>b", "Ab"),
    },
    # Its prompts open the block of thoughts.
    "qwen3_5": {
        "thoughts": Saying("Hm, 3 < 4.\n</think>\n\nFour.", "Four.", "Hm, 3 < 4."),
        "call": Saying(
            "Hm.\n</think>\n\nSo:\n\n" + xml_call(x="3", name="7", round="True", note="None"),
            "So:",
            "Hm.",
            [{"x": 3, "name": "7", "round": True, "note": None}],
        ),
        "two calls": Saying(
            "Hm.\n</think>\n\n" + xml_call(note="3") + "\n" + xml_call(),
            "",
            "Hm.",
            [{"note": "3"}, {}],
        ),
        "no call": Saying("Hm.\n</think>\n\n" + BROKEN, BROKEN, "Hm."),
        "special": Saying("H\n</think>\n\nA<|box_start|>b", "Ab", "H"),
    },
}
OTHER = dict(family="qwen3_5", full_attention_interval=2)
CASES = [
    pytest.param(family, name, marks=[] if family == "qwen3_vl" else [pytest.mark.full])
    for family, sayings in SAYINGS.items()
    for name in sayings
]


def asked(name: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": name}], "tools": TOOLS}


@dataclass(frozen=True)
class Taught:
    """A service with a model that says SAYINGS."""

    client: Client
    http: httpx.Client
    model: str
    tokenizer: Any


@pytest.fixture(scope="module")
def taught(tiny, tmp_path_factory: pytest.TempPathFactory, process_tree: ProcessTree) -> Any:
    """Return `of`: of("qwen3_5") is a service with such a model."""
    running: dict[str, Taught] = {}
    stack = contextlib.ExitStack()

    def of(family: str) -> Taught:
        if family not in running:
            folder = tmp_path_factory.mktemp(family)
            path = folder / "model"
            more = OTHER if family == "qwen3_5" else {}
            shutil.copytree(tiny(layers=2, deepstack=1, vision_depth=1, **more), path)
            if family == "qwen3_5":
                shutil.copyfile(TEMPLATES / "qwen3_5.jinja", path / "chat_template.jinja")
            service = stack.enter_context(
                served(str(path), folder / "run", free_port(), tree=process_tree)
            )
            client = stack.enter_context(Client(service.url, str(path)))
            sayings = SAYINGS[family].items()
            model = teach(client, [(asked(name), each.drawn) for name, each in sayings])
            tokenizer = AutoTokenizer.from_pretrained(path)
            http = stack.enter_context(httpx.Client(base_url=service.url, timeout=100))
            running[family] = Taught(client, http, model.save_for_sampler("taught"), tokenizer)
        return running[family]

    with stack:
        yield of


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or []]


def grown(events: list[Any]) -> dict[str, Any]:
    """Return the message that the deltas of a stream make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                message[name] = message.get(name, type(value)()) + value
    return message


@pytest.mark.parametrize(("family", "name"), CASES)
def test_openais_clients_get_the_parts(taught, family: str, name: str) -> None:
    there, saying = taught(family), SAYINGS[family][name]
    fields = dict(temperature=0, return_token_ids=True)
    whole = answer(there.http, there.model, **asked(name), **fields)
    [choice] = whole["choices"]
    assert there.tokenizer.decode(choice["token_ids"]) == saying.drawn + END
    message = choice["message"]
    assert (message["content"] or "", message.get("reasoning_content")) == (
        saying.content,
        saying.thoughts,
    )
    assert calls_of(message) == saying.calls
    reason = "tool_calls" if saying.calls else "stop"
    assert choice["finish_reason"] == reason
    body = {"model": there.model, "temperature": 0, "stream": True, **asked(name)}
    events = events_of(there.http.post("/v1/chat/completions", json=body))
    message = grown(events)
    assert (message["content"], message["reasoning_content"] or None) == (
        saying.content,
        saying.thoughts,
    )
    assert calls_of(message) == saying.calls
    assert [each["index"] for each in message["tool_calls"]] == list(range(len(saying.calls)))
    assert events[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("family", "name"), CASES)
def test_anthropics_clients_get_the_parts(taught, family: str, name: str) -> None:
    there, saying = taught(family), SAYINGS[family][name]
    expected: list[dict[str, Any]] = []
    if saying.thoughts:
        expected.append({"type": "thinking", "thinking": saying.thoughts, "signature": ""})
    if saying.content:
        expected.append({"type": "text", "text": saying.content})
    expected += [{"type": "tool_use", "name": "look", "input": each} for each in saying.calls]
    reply = there.http.post("/v1/messages", json=of_anthropic(there, name)).json()
    found = reply["content"]
    assert [{k: v for k, v in each.items() if k != "id"} for each in found] == expected
    assert reply["stop_reason"] == ("tool_use" if saying.calls else "end_turn")
    body = of_anthropic(there, name) | {"stream": True}
    blocks: list[dict[str, Any]] = []
    for event in events_of(there.http.post("/v1/messages", json=body)):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        if event["type"] == "content_block_delta":
            delta = {**event["delta"]}
            kind = delta.pop("type")
            [(name, text)] = delta.items()
            if kind == "input_json_delta":
                blocks[-1]["input"] = json.loads(text)
            else:
                blocks[-1][name] += text
        if event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == reply["stop_reason"]
    assert [{k: v for k, v in each.items() if k != "id"} for each in blocks] == expected


def of_anthropic(there: Taught, name: str, **more: Any) -> dict[str, Any]:
    function = TOOLS[0]["function"]
    tool = {"name": "look", "input_schema": function["parameters"]}
    fields = {"model": there.model, "max_tokens": 300, "temperature": 0, "tools": [tool]}
    return fields | {"messages": [{"role": "user", "content": name}], **more}


def of_responses(there: Taught, name: str, **more: Any) -> dict[str, Any]:
    fields = {"model": there.model, "temperature": 0, "tools": flat(TOOLS)}
    return fields | {"input": name, **more}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_clients_of_responses_get_the_parts(taught, family: str, name: str) -> None:
    there, saying = taught(family), SAYINGS[family][name]
    whole, _ = responded(there.http, of_responses(there, name, return_token_ids=True))
    assert there.tokenizer.decode(whole["token_ids"]) == saying.drawn + END
    expected: list[Any] = [("reasoning", saying.thoughts)] if saying.thoughts else []
    expected += [("message", saying.content)] if saying.content else []
    expected += [("function_call", each) for each in saying.calls]
    assert expected == [
        (item["type"], json.loads(item["arguments"]))
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"])
        for item in whole["output"]
    ]
    assert whole["status"] == "completed"
    thoughts = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    before = there.tokenizer.decode(whole["token_ids"][:thoughts])
    assert before == saying.drawn[: saying.drawn.find("</think>") + 8] * bool(saying.thoughts)


BOTH = ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("name", ["call", "two calls"])
def test_an_answer_that_is_sent_back_has_the_tokens_that_were_drawn(
    taught, family: str, name: str
) -> None:
    there, ask = taught(family), asked(name)
    whole = answer(there.http, there.model, **ask, temperature=0, return_token_ids=True)
    [choice] = whole["choices"]
    message = choice["message"]
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": "red"}
        for each in message["tool_calls"]
    ]
    ask["messages"] = [*ask["messages"], message, *results]
    drawn = whole["prompt_token_ids"] + choice["token_ids"]
    ids = prompt_ids(there.client, **ask)
    assert ids[: len(drawn)] == drawn
    body = of_anthropic(there, name)
    content = there.http.post("/v1/messages", json=body).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "red"}
        for each in content
        if each["type"] == "tool_use"
    ]
    body["messages"] += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    counted = there.http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(ids)}
    body = of_responses(there, name, max_output_tokens=300)
    items = there.http.post("/v1/responses", json=body).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "red"}
        for each in items
        if each["type"] == "function_call"
    ]
    body |= {"input": [*as_items(asked(name)["messages"]), *items, *results]}
    body |= {"max_output_tokens": 1, "return_token_ids": True}
    again = there.http.post("/v1/responses", json=body).json()
    assert again["prompt_token_ids"] == ids


@pytest.mark.parametrize("family", BOTH)
def test_thoughts_that_a_template_does_not_show_may_be_sent_back(taught, family: str) -> None:
    """A question follows, so Qwen3.5's template forgets them; Qwen3-VL's knows none."""
    there, ask = taught(family), asked("thoughts")
    [choice] = answer(there.http, there.model, **ask, temperature=0)["choices"]
    plain = {"role": "assistant", "content": "Four."}
    more = {"role": "user", "content": "Sure?"}
    prompts = [
        prompt_ids(there.client, **{**ask, "messages": [*ask["messages"], each, more]})
        for each in (choice["message"], plain)
    ]
    assert choice["message"]["reasoning_content"] and prompts[0] == prompts[1]


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("name", ["call", "two calls", "thoughts"])
def test_an_answer_that_is_cut_inside_a_block(taught, family: str, name: str) -> None:
    """What has come of a call stays text, and what has come of thoughts is thoughts."""
    there, saying = taught(family), SAYINGS[family][name]
    ids = there.tokenizer(saying.drawn).input_ids
    last = "</think>" if name == "thoughts" else "</tool_call>"
    ids = ids[: len(ids) - 1 - ids[::-1].index(there.tokenizer.convert_tokens_to_ids(last))]
    text = there.tokenizer.decode(ids)
    thoughts, _, content = text.rpartition("\n</think>\n\n")
    if name == "thoughts":
        thoughts, content = text.removeprefix("<think>").strip("\n"), ""
    fields = {**asked(name), "temperature": 0, "max_tokens": len(ids)}
    [choice] = answer(there.http, there.model, **fields)["choices"]
    message = choice["message"]
    assert message == {"role": "assistant", "content": content} | (
        {"reasoning_content": thoughts} if thoughts else {}
    )
    assert choice["finish_reason"] == "length"
    body = {"model": there.model, "stream": True, **fields}
    events = events_of(there.http.post("/v1/chat/completions", json=body))
    streamed = grown(events)
    assert (streamed["content"], streamed["reasoning_content"]) == (content, thoughts)
    assert not streamed["tool_calls"]
    body = of_anthropic(there, name, max_tokens=len(ids))
    reply = there.http.post("/v1/messages", json=body).json()
    assert reply["stop_reason"] == "max_tokens"
    assert "".join(each.get("text", "") for each in reply["content"]) == content


def shown(file: Path) -> dict[str, Any]:
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.slow
@pytest.mark.engine("chat")
def test_the_programs_of_the_page_run(tiny, tmp_path: Path, process_tree: ProcessTree) -> None:
    """The agent's model asks for the left side, and names the colour once it has seen it. The
    answer depends on the picture that the tool gives."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    agent, langchain = programs
    for seed, name in enumerate(("photo", "left", "right", "other")):
        (tmp_path / f"{name}.png").write_bytes(picture(64, 64, seed).data)
    properties = {"side": {"type": "string", "enum": ["left", "right"]}}
    function = {
        "name": "crop",
        "description": "Look closer at a side.",
        "parameters": {"type": "object", "properties": properties, "required": ["side"]},
    }
    question = {"type": "text", "text": "What colour is the shape?"}
    first = {"role": "user", "content": [shown(tmp_path / "photo.png"), question]}
    call = {"type": "function", "function": {"name": "crop", "arguments": '{"side": "left"}'}}
    chats = [({"messages": [first]}, "grey")]
    said = '<tool_call>\n{"name": "crop", "arguments": {"side": "left"}}\n</tool_call>'
    tools = [{"type": "function", "function": function}]
    chats.append(({"messages": [first], "tools": tools}, said))
    for name, colour in (("left", "red"), ("other", "blue")):
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        seen = {"role": "tool", "content": [shown(tmp_path / f"{name}.png")]}
        chats.append(({"messages": [first, called, seen], "tools": tools}, colour))
    path = tiny(layers=2, deepstack=1, vision_depth=1, from_scratch=True)
    with (
        served(path, tmp_path / "run", free_port(), tree=process_tree) as service,
        Client(service.url, path) as client,
    ):
        model = teach(client, chats).save_for_sampler("taught")

        def run(program: str) -> str:
            program = program.replace("http://127.0.0.1:8000", service.url).replace("DIR", model)
            done = subprocess.run(
                [ROOT / ".venv-chat" / "bin" / "python", "-c", program],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": ""},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        assert run(agent) == "red"
        shutil.copyfile(tmp_path / "other.png", tmp_path / "left.png")
        assert run(agent) == "blue"
        assert run(langchain) == "grey"
