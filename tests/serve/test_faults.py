# LONG=1 .venv/bin/python -m pytest tests/serve/test_faults.py
"""A service that is killed again and again, at any moment, under the load of several clients.

No promised call is lost or done twice, and every number equals that of a service that was never
killed. A service that is stopped keeps its state and goes on when it starts again.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.serve.test_serve import PROMPTS, STEPS, VOCAB, data_of
from tests.support.pool import free_port
from tests.support.random_runs import LONG
from tests.support.serve_client import Client, Running, log_probs_of, served, start, tokens_of

pytestmark = pytest.mark.alone  # it starts jobs and kills them

KILLS = 40 if LONG else 4
# Log-probs of prompts and samples, which share passes with simultaneous requests. Training results
# are equal. Measured worst: 0.
TOLERANCE = 5e-6
SETTINGS = ("train.micro_batch_size=2", "serve.save_seconds=1.0", "serve.loaded={adapters: 3}")
SETTINGS += ("serve.limits={models: 1000}",)


def life(client: Client, path: str, rank: int, rounds: int, seen: list[Any]) -> list[Any]:
    """Train, save, load and sample as one client; append each answer to `seen` as it comes."""
    model = client.model(rank, seed=rank)
    for step in range(rounds):
        data = data_of(path, step)
        first, second = model.ask_gradients(data[:3]), model.ask_gradients(data[3:])
        seen.append(("result", client.result(first), client.result(second)))
        seen.append(("step", model.step(**STEPS[step % 3])))
        if step % 2:
            sampler = model.sampler()
            more = {"prompt_logprobs": True}
            response = sampler.sample(PROMPTS[1], 2, more, max_tokens=4, seed=step, stop=[])
            log_probs = [np.frombuffer(response.prompt_logprobs, "<f4")[1:]]
            seen.append(("sample", tokens_of(response), [*log_probs, *log_probs_of(response)]))
        if step % 3 == 2:
            seen.append(("loaded", client.loaded(model.save(f"{step}"), True).id[-8:]))
    return seen


def lives(
    url: str, path: str, rounds: int, answers: list[list[Any]], patience_s: float = 0.0
) -> list[list[Any]]:
    """Fill in and return the answers of several clients that run at once."""

    def one(place: int) -> None:
        with Client(url, path, patience_s=patience_s) as client:
            life(client, path, RANKS[place], rounds, answers[place])

    with ThreadPoolExecutor(len(RANKS)) as pool:
        list(pool.map(one, range(len(RANKS))))
    return answers


RANKS = (0, 2, 3, 4)


def same(ours: list[Any], theirs: list[Any]) -> float:
    """Check that all results are equal; return the largest difference of samples' log-probs."""
    worst = 0.0
    assert len(ours) == len(theirs)
    for (kind, *actual), (_, *expected) in zip(ours, theirs, strict=True):
        if kind == "sample":
            assert actual[0] == expected[0]
            for a, b in zip(actual[1], expected[1], strict=True):
                worst = max(worst, float(np.nanmax(abs(np.array(a) - np.array(b)))))
        elif kind != "loaded":
            assert actual == expected
    return worst


class Killer:
    """A thread that kills a service whenever its clients have so many answers, and starts it
    again."""

    def __init__(self, start_again: Callable[[], Running], answers: list[list[Any]]):
        self.running, self.start_again, self.answers = start_again(), start_again, answers
        self.is_over = threading.Event()

    def kill_at(self, counts: Sequence[int]) -> None:
        for count in counts:
            while sum(map(len, self.answers)) < count:
                if self.is_over.wait(0.001):
                    return
            self.running.kill()
            self.running = self.start_again()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.rotate(1)
@pytest.mark.parametrize("layout", ["parallel.pp=1", "parallel.pp=2"])
def test_a_service_that_is_killed_loses_nothing(layout, tiny, tmp_path, record_property):
    if layout != "parallel.pp=1" and KILLS > 20:
        pytest.skip("KILLS above 20 are for one process")
    path, port = tiny(vocab=VOCAB), free_port()
    rounds = max(8, 3 * KILLS // 2)
    with served(path, tmp_path / "calm", port, layout, *SETTINGS) as running:
        expected = lives(running.url, path, rounds, [[] for _ in RANKS])
    total, answers = sum(map(len, expected)), [list[Any]() for _ in RANKS]
    counts = sorted(random.Random(7).sample(range(1, total), KILLS))
    killer = Killer(lambda: start(path, tmp_path / "killed", port, layout, *SETTINGS), answers)
    with ThreadPoolExecutor(1) as pool:
        kills = pool.submit(killer.kill_at, counts)
        try:
            actual = lives(f"http://127.0.0.1:{port}", path, rounds, answers, patience_s=120)
        finally:
            killer.is_over.set()
            kills.result()
            killer.running.kill()
    worst = max(same(a, b) for a, b in zip(actual, expected, strict=True))
    record_property("worst", worst)
    assert worst <= TOLERANCE


@pytest.mark.slow
def test_a_service_that_stops_goes_on_where_it_was(tiny, tmp_path):
    """The service keeps gradients that no step has used, and a promise that nobody has fetched."""
    path, port = tiny(vocab=VOCAB), free_port()
    with served(path, tmp_path / "calm", port) as running, Client(running.url, path) as client:
        expected = halves(client, path, lambda: None)
    folder = tmp_path / "stopped"
    running = start(path, folder, port)
    try:
        with Client(running.url, path, patience_s=120) as client:

            def again() -> None:
                nonlocal running
                assert running.stop() == 75
                assert (folder / "states").is_dir() and not list(
                    (folder / "states").glob("*.partial")
                )
                running = start(path, folder, port)

            assert halves(client, path, again) == expected
    finally:
        running.kill()


def halves(client: Client, path: str, between: Any) -> list[Any]:
    models = [client.model(0), client.model(3)]
    data = data_of(path, 0)
    for model in models:
        model.gradients(data)
        model.step(**STEPS[0])
        model.gradients(data[:2])
    sampler = models[1].sampler()
    promises = [model.ask_gradients(data[2:]) for model in models]
    time.sleep(0.01)
    between()
    results = [client.result(promise) for promise in promises]
    results += [model.step(**STEPS[1]) for model in models]
    results += [sampler.log_probs(chunks).tobytes() for chunks in PROMPTS]
    results += [model.gradients(data, forward_only=True)[0] for model in models]
    return results
