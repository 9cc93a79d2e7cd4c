# .venv/bin/python -m pytest tests/serve/test_kills.py
"""A front that is killed again and again under the load of clients.

The clients send a request again until it is answered, as the public client does. Each call is done
once, in order, and gets its own result.
"""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.fake_calls import opened

ROOT = Path(__file__).parents[2]
CLIENTS = 6
STEPS = 150
KILLS = 10

pytestmark = [
    pytest.mark.alone,  # it starts jobs and kills them
    pytest.mark.slow,
]


class Server:
    """The process of a service, which is killed and started again."""

    def __init__(self, run):
        self.run, self.port = run, 0
        self.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [
            sys.executable,
            "-m",
            "tests.support.fake_service",
            str(self.run),
            str(self.port),
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started, port = self.process.stdout.readline().split()
        assert started == "started"
        self.port = int(port)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.stdout.close()
        assert self.process.wait() == -signal.SIGKILL


def persistent(http, path, value, stop):
    """Send the same request until there is an answer, as the client does."""
    while time.monotonic() < stop:
        try:
            answer = http.post(f"/api/v1/{path}", json=value)
        except httpx.TransportError:
            time.sleep(0.02)
            continue
        if answer.status_code not in (408, 429, 503):
            assert answer.status_code == 200, (path, answer.text)
            return answer.json()
    raise AssertionError(f"{path} was not answered")


def train(url, chance, stop):
    """Send one client's calls in any order, some twice; return (model, promises, results)."""
    with httpx.Client(base_url=url, timeout=60) as http:
        session = persistent(http, "create_session", {}, stop)["session_id"]
        value = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model"}
        promise = persistent(http, "create_model", value, stop)
        model = persistent(http, "retrieve_future", promise, stop)["model_id"]
        promises, results = {}, {}
        for start in range(1, STEPS + 1, 5):
            seqs = [*range(start, start + 5), start + 2]
            chance.shuffle(seqs)
            for seq in seqs:
                params = {"learning_rate": seq / 1000}
                step = {"model_id": model, "seq_id": seq, "adam_params": params}
                promise = persistent(http, "optim_step", step, stop)
                assert promises.setdefault(seq, promise) == promise
            for seq in set(seqs):
                results[seq] = persistent(http, "retrieve_future", promises[seq], stop)
        return model, promises, results


def test_no_kill_loses_a_call_or_does_one_twice(tmp_path):
    chance = random.Random(17)
    server, stop = Server(tmp_path), time.monotonic() + 240
    under_load = 0
    try:
        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = [
                threads.submit(train, server.url, random.Random(i), stop) for i in range(CLIENTS)
            ]
            for _ in range(KILLS):
                time.sleep(chance.uniform(0.02, 0.25))
                under_load += not all(client.done() for client in clients)
                server.kill()
                server.start()
            outcomes = [client.result() for client in clients]
    finally:
        server.kill()
    assert under_load == KILLS
    with opened(tmp_path) as journal:
        assert journal.open_calls() == [] and journal.contradictions == 0
        assert len(journal.models()) == CLIENTS
        for model, promises, results in outcomes:
            # Each call is in the journal once: a replay has all of them, in order.
            assert [call.seq for call in journal.replay(model)] == list(range(1, STEPS + 1))
            for call in journal.replay(model):
                assert call.request_id == promises[call.seq]["request_id"]
                assert results[call.seq]["metrics"] == {"lr:mean": call.seq / 1000}
