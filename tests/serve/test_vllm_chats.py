# make vllm-env chat-env, then .venv/bin/python -m pytest tests/serve/test_vllm_chats.py
"""Chats whose answers real vLLM draws: prompts, log-probs and streams are those of a service that
draws them itself, by the same tests, and those of vLLM's own server."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megatron_vlm.commands.bench.model_server import BenchModel, BenchSettings, served_model
from tests.serve.test_chat_routes import CHATS, TOLERANCE, TOOLS, answer, shown, text
from tests.serve.test_chat_routes import (
    test_a_stream_gives_the_same_answers_in_pieces as check_stream,
)
from tests.serve.test_chat_routes import test_completions_score_their_prompts as check_completions
from tests.serve.test_chat_routes import (
    test_prompts_and_log_probs_are_those_of_transformers as check_answers,
)
from tests.serve.test_chat_routes import test_who_hangs_up_frees_the_rows as check_hanging_up
from tests.serve.test_vllm import ENGINE
from tests.support.engine import ENVIRONMENT, ROOT
from tests.support.pool import free_port
from tests.support.serve_client import served

pytestmark = [
    pytest.mark.slow,  # each engine takes 15 s to start
    pytest.mark.engine("vllm"),
]


@pytest.fixture(scope="module")
def path(tiny) -> str:
    return tiny(vocab=509, head_dim=32, from_scratch=True)


@pytest.fixture(scope="module")
def client(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    words = [word for word in ENGINE if "max_len" not in word]
    folder = tmp_path_factory.mktemp("chats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for each process: the model is tiny
        with (
            served(path, folder, free_port(), *words, "engine.max_len=30000") as service,
            httpx.Client(base_url=service.url, timeout=100) as found,
        ):
            yield found


@pytest.mark.parametrize("name", CHATS)
def test_prompts_and_log_probs_are_those_of_transformers(client, path: str, name: str) -> None:
    check_answers(client, path, name)


def test_a_stream_gives_the_same_answers_in_pieces(client, path: str) -> None:
    check_stream(client, path)


def test_completions_score_their_prompts(client, path: str) -> None:
    check_completions(client, path)


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_frees_the_rows(client, path: str, stream: bool) -> None:
    check_hanging_up(client, path, stream)


# The template gets tools in the form that vLLM's own server gives them: with all fields, in order.
LOOK = {"name": "look", "description": "Look.", "parameters": TOOLS[0]["function"]["parameters"]}
# Pictures that need no resizing, for which it has another program.
SAME = {
    "text": CHATS["text"],
    "pictures": [
        {"role": "user", "content": [shown(64, 96, 1), text("or"), shown(96, 64, 2, "jpeg")]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [text("And "), shown(64, 64, 3), text("?")]},
    ],
    "tools": [
        *CHATS["a tool's picture"][:2],
        {"role": "tool", "tool_call_id": "a", "content": [text("seen: "), shown(64, 64, 5)]},
    ],
}
SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("chat/completions", {"messages": SAME["text"], "max_tokens": 60, **SCORED}),
    "pictures": ("chat/completions", {"messages": SAME["pictures"], "max_tokens": 12, **SCORED}),
    "tools": (
        "chat/completions",
        {
            "messages": SAME["tools"],
            "tools": [{"type": "function", "function": LOOK}],
            "max_tokens": 12,
            **SCORED,
        },
    ),
    "stop": ("chat/completions", {"messages": SAME["text"], "stop": ["kk", "zq"], **SCORED}),
    "tokens": (
        "completions",
        {"prompt": [[5, 6, 7, 300, 8], [9, 9, 30]], "max_tokens": 4, "logprobs": 2, "echo": True},
    ),
    "words": (
        "completions",
        {"prompt": "What is red?", "max_tokens": 6, "logprobs": 2, "echo": True},
    ),
}


@pytest.fixture(scope="module")
def theirs(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of vLLM's own server."""
    words = "--max-model-len 30000 --enforce-eager --dtype float32 --skip-mm-profiling"
    words += " --enable-auto-tool-choice --tool-call-parser hermes"
    python = str(ENVIRONMENT / "bin" / "python")
    settings = BenchSettings((), python, words.split(), None, "", [], None, None, 1)
    log = tmp_path_factory.mktemp("theirs") / "log.txt"
    with served_model(settings, BenchModel(path, path), log) as found:
        headers = {"Authorization": f"Bearer {found.key}"}
        with httpx.Client(base_url=found.url, headers=headers, timeout=100) as client:
            yield client


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_vllms_own_server(
    client, theirs, path: str, name: str, record_property
) -> None:
    """Field by field. Its own tell the bytes of a character at its last token, and leave the text
    of a prompt out. Measured log-probs: 1.9e-6."""
    route, fields = QUESTIONS[name]
    body = {"model": path, "temperature": 0, "return_token_ids": True, **fields}
    ours, other = (each.post(f"/v1/{route}", json=body).json() for each in (client, theirs))
    assert ours["usage"].items() <= other["usage"].items()
    for key in ("object", "model", "prompt_token_ids"):
        assert ours.get(key) == other.get(key), key
    apart = [0.0]
    for one, two in zip(ours["choices"], other["choices"], strict=True):
        for key in ("index", "finish_reason", "token_ids"):
            assert one[key] == two[key], key
        if "message" in one:
            assert one["message"].items() <= two["message"].items()
            apart += of_entries(one["logprobs"], two["logprobs"], one["finish_reason"])
        else:
            assert one["prompt_token_ids"] == two["prompt_token_ids"]
            assert one["text"].endswith(two["text"])
            apart += of_columns(one["logprobs"], two["logprobs"])
    record_property("worst", max(apart))
    assert max(apart) < TOLERANCE


def of_entries(ours: Any, other: Any, reason: str) -> list[float]:
    """Return the differences of the log-probs of a chat. The token that ends an answer has one in
    vLLM's alone."""
    count = len(ours["content"])
    assert count and count <= len(other["content"]) <= count + (reason == "stop")
    apart = []
    for one, two in zip(ours["content"], other["content"], strict=False):
        both = zip([one, *one["top_logprobs"]], [two, *two["top_logprobs"]], strict=True)
        for a, b in both:
            apart.append(abs(a["logprob"] - b["logprob"]))
            if "\ufffd" not in a["token"]:
                assert (a["token"], a["bytes"]) == (b["token"], b["bytes"])
    return apart


def of_columns(ours: Any, other: Any) -> list[float]:
    """Return the differences of the log-probs of a completion with its prompt. Where several of the
    most likely tokens are a part of a character, vLLM's have the same text, and one is left."""
    firsts = [
        each[name][0] for each in (ours, other) for name in ("token_logprobs", "top_logprobs")
    ]
    assert firsts == [None] * 4
    pairs = list(zip(ours["token_logprobs"][1:], other["token_logprobs"][1:], strict=True))
    tops = list(zip(ours["top_logprobs"][1:], other["top_logprobs"][1:], strict=True))
    plain = [(one, two) for one, two in tops if "" not in two]
    assert plain and all(one.keys() == two.keys() for one, two in plain)
    pairs += [(one[name], two[name]) for one, two in plain for name in one]
    if "" not in other["tokens"]:  # no part of a character
        assert all(ours[key] == other[key] for key in ("tokens", "text_offset"))
    return [abs(one - two) for one, two in pairs]


TWO = {"messages": CHATS["text"], "temperature": 1, "seed": 3, "n": 2, "max_tokens": 30}


def test_n_answers_differ_and_come_again(client, path: str) -> None:
    first, again = (answer(client, path, **TWO)["choices"] for _ in range(2))
    assert first == again and first[0]["message"] != first[1]["message"]


SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}, "is_red": {"type": "boolean"}},
    "required": ["x", "is_red"],
    "additionalProperties": False,
}


RETURNED: dict[str, Any] = dict(max_tokens=100, return_token_ids=True)


def cut(reply: Any) -> bool:
    return reply["choices"][0]["finish_reason"] == "length"


def held_to(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_answers_keep_to_a_schema(client, theirs, path: str) -> None:
    """The most likely one is that of vLLM's own server."""
    fields = dict(max_tokens=100, return_token_ids=True, response_format=held_to(SCHEMA))
    likeliest = [
        answer(each, path, CHATS["text"], temperature=0, **fields) for each in (client, theirs)
    ]
    ours, other = (each["choices"][0] for each in likeliest)
    for key in ("finish_reason", "token_ids"):
        assert ours[key] == other[key]
    for held in ({"choice": ["left", "right"]}, {"regex": "[a-c]{3}/"}):
        both = [
            answer(each, path, CHATS["text"], temperature=0, structured_outputs=held, **RETURNED)
            for each in (client, theirs)
        ]
        assert both[0]["choices"][0]["token_ids"] == both[1]["choices"][0]["token_ids"]
    call = answer(client, path, CHATS["text"], tools=TOOLS, tool_choice="required", max_tokens=300)
    assert call["choices"][0]["message"]["content"] in (None, "") or cut(call)
    drawn = answer(client, path, CHATS["a picture"], temperature=1, seed=1, n=8, **fields)[
        "choices"
    ]
    said = [
        json.loads(each["message"]["content"]) for each in drawn if each["finish_reason"] == "stop"
    ]
    assert len(said) > 3
    for each in said:
        assert set(each) == {"x", "is_red"} and each["x"] in (1, 22)
        assert isinstance(each["is_red"], bool)
    free = answer(
        client, path, CHATS["text"], max_tokens=9, response_format={"type": "json_object"}
    )
    assert free["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("form", [held_to({"type": "colour"}), held_to(3), {"type": "xml"}])
def test_a_schema_that_vllm_cannot_read_is_a_mistake(client, path: str, form: Any) -> None:
    body = {"model": path, "messages": CHATS["text"], "response_format": form}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert "response_format" in reply.json()["error"]["message"]
    assert answer(client, path, CHATS["text"], max_tokens=2)["usage"]["completion_tokens"] <= 2


@pytest.mark.engine("chat")
def test_the_table_of_the_page_is_what_the_programs_find(monkeypatch) -> None:
    """Else: python scripts/make_client_table.py"""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    page = (ROOT / "docs" / "serve-chats.md").read_text()
    made = importlib.import_module("make_client_table").with_table(page)
    assert made == page and "**no**" not in page
