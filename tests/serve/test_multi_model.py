# .venv/bin/python -m pytest tests/serve/test_multi_model.py
"""The calls that a service does in one turn: which ones share a pass, and their results, which are
those that each call gets alone."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from megatron_vlm.config.schema import Config, ParallelConfig, TrainConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import DataError
from megatron_vlm.serve.call_scheduler import FULL, TOGETHER, CallBatcher
from megatron_vlm.serve.journal.journal_records import Call, Changes, Failure, Outcome
from megatron_vlm.serve.service import run_each
from tests.serve.test_serve import PROMPTS, STEPS, VOCAB, data_of
from tests.support.pool import free_port
from tests.support.serve_client import (
    Client,
    FailedError,
    Model,
    Running,
    log_probs_of,
    read_output,
    served,
    tokens_of,
)


def call(name: str, model: str, kind: str = "forward_backward", attempts: int = 0) -> Call:
    return Call(kind, model, 1, "", changes_state=True, request_id=name, attempts=attempts)


@dataclass(frozen=True)
class Read:
    """The parts of a request that the batcher reads."""

    rows: tuple[int, ...]
    forward_only: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True)
class ReadCalls:
    of: dict[str, Read | None]

    def look(self, call: Call) -> Read | None:
        return self.of[call.request_id]


def rows(count: int, tokens: int = 10) -> Read:
    return Read((tokens,) * count)


def batcher(reads: dict[str, Read | None], pp: int = 2, dp: int = 1, **more: Any) -> CallBatcher:
    cfg = Config(parallel=ParallelConfig(pp=pp, **more), train=TrainConfig(micro_batch_size=2))
    dims = ParallelDims.create(cfg.parallel, pp * dp, 8)
    loaded = lambda model: model != "away"  # noqa: E731
    return CallBatcher(cfg, dims, ReadCalls(reads), lambda call: call.owner, loaded)  # type: ignore[arg-type]


def names(found: list[Call]) -> list[str]:
    return [each.request_id for each in found]


ROOM = 2 * FULL * 2  # rows of a pass at PP2 with two rows in a micro-batch


def test_small_calls_fill_the_pipeline():
    reads = {"a": rows(3), "b": rows(ROOM - 6), "c": rows(4), "d": rows(2), "e": rows(1)}
    calls = [call(name, f"model {name}") for name in reads]
    # a takes two micro-batches, and b takes all but three. The last one is too small for c, but d
    # fits and fills it.
    assert names(batcher(reads).batch_with(calls[0], calls)) == ["a", "b", "d"]
    assert names(batcher(reads, dp=2).batch_with(calls[0], calls)) == ["a", "b", "c", "d", "e"]
    assert names(batcher(reads, pp=4).batch_with(calls[3], calls)) == ["d", "a", "b", "c", "e"]


def test_a_large_call_fills_it_alone():
    reads = {"a": rows(ROOM), "b": rows(1)}
    calls = [call(name, f"model {name}") for name in reads]
    assert names(batcher(reads).batch_with(calls[0], calls)) == ["a"]
    assert names(batcher(reads).batch_with(calls[1], calls)) == ["b"]


@pytest.mark.parametrize("more", [dict(pp=1), dict(overlap_grad_reduce=True, dp=2)])
def test_where_a_pass_cannot_be_shared_each_is_alone(more):
    reads: dict[str, Read | None] = {"a": rows(1), "b": rows(1)}
    calls = [call(name, name) for name in reads]
    assert names(batcher(reads, **more).batch_with(calls[0], calls)) == ["a"]


def test_what_goes_with_no_other():
    reads: dict[str, Read | None] = {
        "fine": rows(1),
        "forward": replace(rows(1), forward_only=True),
        "unread": None,
        "away": rows(1),
        "again": rows(1),
        "step": None,
        "also fine": rows(1),
    }
    calls = [
        call("fine", "1"),
        call("forward", "2"),
        call("unread", "3"),
        call("away", "away"),
        call("again", "5", attempts=1),
        call("step", "6", "optim_step"),
        call("also fine", "7"),
    ]
    group = batcher(reads)
    assert names(group.batch_with(calls[0], calls)) == ["fine", "also fine"]
    for alone in calls[1:-1]:
        assert names(group.batch_with(alone, calls)) == [alone.request_id]


def test_samples_with_the_same_weights_go_together():
    asked = {"a": 3, "other": 1, "b": TOGETHER - 4, "large": 2, "c": 1, "again": 1}
    reads: dict[str, Any] = {name: SimpleNamespace(n=n) for name, n in asked.items()}
    calls = [call(name, "weights", "asample", attempts=name == "again") for name in asked]
    calls[1] = replace(calls[1], owner="other weights")
    assert names(batcher(reads).batch_with(calls[0], calls)) == ["a", "b", "c"]


def test_time_is_shared_by_tokens():
    reads: dict[str, Read | None] = {"a": rows(1, 30), "b": rows(2, 45), "c": rows(0)}
    calls = [call(name, name) for name in reads]
    assert batcher(reads).sizes(calls) == {"a": 30, "b": 90, "c": 1}
    assert batcher(reads).sizes(calls[:1]) == {"a": 1.0}


RANKS = (2, 0, 3, 4)
SETTINGS = ("parallel.pp=2", "train.micro_batch_size=2", "serve.loaded={adapters: 3}")


def in_turns(running: Running, models: list[Model], path: str, step: int) -> list[Any]:
    return [read_output(model.client.result(ask(model, path, step))) for model in models]


def at_once(running: Running, models: list[Model], path: str, step: int) -> list[Any]:
    """Send a call per model while the first pass waits for the last stage; return results.

    That pass may be the first call's alone. The others are all pending when it ends.
    """
    with running.paused(rank=1):
        promises = [ask(model, path, step) for model in models]
    return [read_output(m.client.result(each)) for m, each in zip(models, promises, strict=True)]


def ask(model: Model, path: str, step: int) -> str:
    number = int(model.id[-1])
    data = data_of(path, step + number)[: 1 + number]
    if number % 2 == 0:
        return model.ask_gradients(data)
    samples = [
        (
            chunks,
            {
                "target_tokens": i["target_tokens"],
                "advantages": i["weights"],
                "logprobs": i["weights"] - 6,
            },
        )
        for chunks, i in data
    ]
    return model.ask_gradients(samples, "importance_sampling")


def lives(running: Running, path: str, asking: Any) -> list[Any]:
    """Take steps with several models and return the results."""
    with Client(running.url, path) as client:
        models = [client.model(rank, seed=rank) for rank in RANKS]
        results = []
        for step in range(3):
            for metrics, arrays in asking(running, models, path, step):
                results.append((metrics, [np.array(each).tolist() for each in arrays]))
            results += [model.step(**STEPS[step]) for model in models]
        return results


@pytest.mark.slow
def test_models_that_share_a_pass_get_what_they_get_in_turns(tiny, tmp_path):
    path, port = tiny(vocab=VOCAB), free_port()
    with served(path, tmp_path / "turns", port, *SETTINGS) as running:
        expected = lives(running, path, in_turns)
        assert shared_passes(running.url) == 0
    with served(path, tmp_path / "at once", port, *SETTINGS) as running:
        actual = lives(running, path, at_once)
        assert shared_passes(running.url) >= 3
    assert actual == expected


def shared_passes(url: str) -> float:
    name = "megatron_vlm_passes_of_several_models_total"
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


@dataclass
class PickyCalls:
    """A handler that refuses calls together with a bad one."""

    requested: list[list[str]]

    def forward_backward(self, calls: list[tuple[Call, Any]]) -> Any:
        self.requested.append(names([each for each, _ in calls]))
        if any(each.owner == "bad" for each, _ in calls):
            raise DataError("the rows are bad")
        return [(Outcome(each.owner.encode()), Changes()) for each, _ in calls]


def test_one_that_is_refused_takes_no_others_along():
    picky = PickyCalls([])
    read = [(call("a", "fine"), None), (call("b", "bad"), None), (call("c", "good"), None)]
    results = run_each(picky.forward_backward, read)
    assert [each.request_id for each in results] == ["a", "b", "c"]
    assert [each.outcome for each in results] == [
        Outcome(b"fine"),
        Failure("the rows are bad", "user"),
        Outcome(b"good"),
    ]
    assert picky.requested == [["a", "b", "c"], ["a"], ["b"], ["c"]]


DRAWN: list[dict[str, Any]] = [
    dict(max_tokens=50, temperature=1.0, stop=[]),
    dict(max_tokens=5, temperature=0.7, stop=[]),
    dict(max_tokens=30, temperature=1.3, top_k=50, stop=[7, 8, 9, 10]),
    dict(max_tokens=33, temperature=0.0, stop=[]),
    dict(max_tokens=40, temperature=1.0, top_p=0.8, stop=["ab", "e", "th"]),
    dict(max_tokens=40, temperature=0.6, stop=[]),
]


def done_at(run: Path, promise: str) -> float:
    """Return the time in the journal at which a call was done."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        [(done,)] = db.execute("SELECT done FROM calls WHERE request_id = ?", (promise,))
    return float(done)


@pytest.mark.slow
@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    "layout", [(), ("parallel.pp=2",), ("launch.processes=2",)], ids=["1x1x1", "pp2", "dp2"]
)
def test_samples_come_and_go_and_wait_between_turns(layout, tiny, tmp_path):
    """Each answer equals the one that is drawn alone.

    Samples share passes, other calls are done between their turns, and the model learns meanwhile.
    The turns end after one look at the pending calls.
    """
    path, port = tiny(vocab=VOCAB), free_port()
    few = ("engine.rows=3", "serve.sampling_seconds=0.001", *layout)
    with served(path, tmp_path, port, *few) as running, Client(running.url, path) as client:
        model, other = client.model(2, seed=1), client.sampler(base_model=path)
        model.gradients(data_of(path, 0))
        model.step(**STEPS[0])
        sampler = model.sampler()

        def ask(whose: Any, place: int, **more: Any) -> str:
            n = 1 + place % 3
            return str(whose.ask(PROMPTS[place % 2], n, seed=place, **DRAWN[place], **more))

        every = [(whose, place) for whose in (sampler, other) for place in range(len(DRAWN))]
        alone = [client.sampled(ask(*each)) for each in every]
        long = sampler.ask(PROMPTS[0], 1, max_tokens=500, seed=1, stop=[])
        small = model.ask_gradients(data_of(path, 1))  # sent at once, so that they meet
        together = [ask(*each) for each in every[:6]]
        bad = sampler.ask([[VOCAB + 7]], 1, max_tokens=40)
        read_output(client.result(small))
        model.step(**STEPS[1])
        together += [ask(*each) for each in every[6:]]
        newer = ask(model.sampler(), 0)
        drawn = [client.sampled(each) for each in together]
        with pytest.raises(FailedError, match=str(VOCAB + 7)):
            client.result(bad)
        for actual, expected in zip(drawn, alone, strict=True):
            assert tokens_of(actual) == tokens_of(expected)
            for a, b in zip(log_probs_of(actual), log_probs_of(expected), strict=True):
                assert np.allclose(a, b, rtol=0, atol=1e-5)
        assert tokens_of(client.sampled(newer)) != tokens_of(alone[0])
        assert len(tokens_of(client.sampled(long))[0]) == 500
        for promise in (small, together[0]):
            assert done_at(tmp_path, promise) < done_at(tmp_path, long)
        assert running.stop() == 75
