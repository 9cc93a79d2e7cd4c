# .venv/bin/python -m pytest tests/rl/test_agent_servers.py
"""Agents that are servers: what ends an episode, and what its server may do wrong; and the forms of
the errors that agents get."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from megatron_vlm.family import read_sizes
from megatron_vlm.rl.agent_server import AgentServer
from tests.rl.test_agents import Played, folder, model
from tests.rl.test_train_batch import config
from tests.support import agent_program

__all__ = ["folder", "model"]  # fixtures


# What a long-lived server of agents does with an episode, and what comes of it.
SERVED = {
    "answers": 3.0,
    "posts": 4.0,
    "posts later": 4.0,
    "breaks": "answered with status 500: no tool today",
    "says nothing": "gave no reward",
    "floods": "gave no reward",
    "hangs": "took longer than rl.agent_timeout=3 seconds",
    "never posts": "took longer than rl.agent_timeout=3 seconds",
    "gone": "cannot be reached: All connection attempts failed",
}


@contextmanager
def agents_at(kind: str) -> Iterator[str]:
    """Yield the address of a server of agents."""
    done = threading.Event()

    class Agent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert given["solution"] == 7 and self.path == "/agent"
            body = {"model": given["OPENAI_MODEL"], "messages": given["messages"]}
            url, key = given["OPENAI_BASE_URL"], given["OPENAI_API_KEY"]
            assert f"/e/{key}/v1" in url
            agent_program.post(url + "/chat/completions", body)
            if kind == "posts":
                agent_program.post(given["REWARD_URL"], 4)
            if kind == "hangs":
                done.wait()
            said = {"answers": '{\n"reward": 3}', "breaks": "no tool today", "floods": "x" * 10**7}
            text = said.get(kind, "").encode()
            statuses = {"breaks": 500, "posts later": 202, "never posts": 202}
            self.send_response(statuses.get(kind, 200))
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(text)
            if kind == "posts later":
                agent_program.post(url + "/chat/completions", body)
                agent_program.post(given["REWARD_URL"], 4)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    address = f"http://127.0.0.1:{server.server_port}/agent"
    if kind == "gone":
        server.server_close()
        yield address
        return
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield address
    finally:
        done.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("kind", SERVED)
def test_an_agent_may_be_a_server(folder, model, kind, capfd):
    expected, seconds = SERVED[kind], 3.0 if kind in ("hangs", "never posts") else 100.0
    with agents_at(kind) as url:
        given: dict[str, Any] = {"agent": url, "failed_reward": -1.0, "agent_timeout": seconds}
        played = Played(folder, model, kind, **given)
    is_text = isinstance(expected, str)
    assert [each.reward for each in played.episodes] == [-1 if is_text else expected] * 2
    answers = 0 if kind == "gone" else 2 if kind == "posts later" else 1
    assert [len(each.answers) for each in played.episodes] == [answers] * 2
    assert not is_text or expected in capfd.readouterr().err


def test_errors_have_the_form_of_their_api(folder, model):
    """Also those of paths that no episode has, and of a page in a browser."""
    loop = asyncio.new_event_loop()
    agents = AgentServer(config(folder, model, agent="true"), read_sizes(model), 9, loop)
    try:
        for path in ("v1/models", "v1/nothing", "reward", "anthropic/v1/messages", "anthropic/x"):
            for head, status in (({}, 410), ({"Origin": "http://evil"}, 403)):
                is_unknown = path in ("v1/nothing", "anthropic/x") and not head
                method = "POST" if path in ("reward", "anthropic/v1/messages") else "GET"
                url = f"http://127.0.0.1:{agents.port}/e/nobody/{path}"
                answer = httpx.request(method, url, headers=head)
                assert answer.status_code == (404 if is_unknown else status)
                error, body = answer.json()["error"], answer.json()
                assert ("type" in body) == path.startswith("anthropic")
                assert error["message"] and "serve.keys" not in error["message"]
    finally:
        agents.close()
        loop.close()
