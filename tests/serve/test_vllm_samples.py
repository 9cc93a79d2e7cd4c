# .venv/bin/python -m pytest tests/serve/test_vllm_samples.py
"""Samples of a service that an engine draws: all at a time, with the weights of their sessions,
once each, whatever happens to the engine or the service. A process without a model stands in for
vLLM; tests/serve/test_vllm.py has the real one."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_vlm.config import load_config
from megatron_vlm.config.command_checks import check_serve
from megatron_vlm.config.schema import EngineConfig
from megatron_vlm.distributed.process import STOPPED_EARLY
from megatron_vlm.engines.engine_kinds import EngineSettings, check_engine, engine_kind
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Capacity
from megatron_vlm.engines.server.adapter_folders import rank_for
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.serve.engine_samples import Admission, EngineSampling
from megatron_vlm.serve.engine_weights import FORM, SampleWeights
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Accepted,
    Call,
    Failure,
    Outcome,
    SamplingSession,
)
from megatron_vlm.serve.protocol.protobuf import message
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.serve.sample_calls import SampleBounds, StopWords, _spread_seed
from megatron_vlm.serve.served_models import ModelSettings
from tests.support.fake_calls import CallJournal
from tests.support.fake_engine import DEADLY, HELD, SLOW, contents, ids_of, number_of
from tests.support.pool import free_port
from tests.support.ports import descendants
from tests.support.process_tree import ProcessTree
from tests.support.serve_client import Client, FailedError, Model, log_probs_of, start, tokens_of

pytestmark = pytest.mark.alone  # it starts jobs and kills them

STAND_IN = Path(__file__).parents[1] / "support" / "fake_engine.py"
PATIENCE_S = 60.0
VOCAB = 400  # of the answers of the stand-in


def python_of(folder: Path) -> str:
    """A python whose engines are stand-ins."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    return str(python)


def options_of(folder: Path) -> dict[str, Any]:
    files = {name: str(folder / name) for name in ("release", "asked")}
    return {"vocab": VOCAB, "once": str(folder / "died" / "once"), **files}


def until(what: Callable[[], Any]) -> Any:
    """What it says, once that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.01)
    raise TimeoutError


@dataclass
class Desk:
    """A service without ranks: the journal, and who has its samples drawn."""

    run: Path
    folder: str
    journal: CallJournal
    engine_sampling: EngineSampling
    engines: EngineThread
    session: str
    numbers: Any = field(default_factory=count)

    def sampler(self, name: str = "base", rank: int = 0) -> str:
        """A sampling session of the base model, or of a snapshot of this name."""
        snapshot = None
        if name != "base":
            snapshot = self.run / "weights" / name
            (snapshot / FORM).mkdir(parents=True, exist_ok=True)
            (snapshot / FORM / "x.safetensors").write_text(name)
        facts = {"form": asdict(ModelSettings(rank, 0))}
        id = f"{self.session}:sample:{next(self.numbers)}"
        new = SamplingSession(id, self.session, None, "tiny", snapshot, facts=facts)
        self.journal.create_sampler(new)
        return id

    def ask(self, sampler: str, *ids: int, key: str = "local", n: int = 1, more: Any = None) -> str:
        """The promise."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": next(self.numbers),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]},
            "num_samples": n,
            "sampling_params": {"max_tokens": 4, "seed": ids[-1], **(more or {}).pop("params", {})},
            **(more or {}),
        }
        new = Call(SAMPLE, sampler, body["seq_id"], key, json.dumps(body).encode())
        promise = self.journal.accept(new)
        assert isinstance(promise, Accepted)
        return promise.request_id

    def outcome(self, promise: str) -> Outcome | Failure | None:
        found = self.journal.result(promise)
        assert found is not None
        return found.outcome

    def answer(self, promise: str) -> list[list[int]]:
        found = until(lambda: self.outcome(promise))
        assert isinstance(found, Outcome), found
        answer = message("SampleResponse")
        answer.ParseFromString(found.content)
        return tokens_of(answer)

    def failure(self, promise: str) -> Failure:
        found = until(lambda: self.outcome(promise))
        assert isinstance(found, Failure)
        return found

    @property
    def asked(self) -> list[tuple[int, str | None]]:
        """What the engine was asked: how each prompt begins, and its adapter's snapshot."""
        file = self.run / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        pairs = map(json.loads, lines)
        return [(ids[0], None if each is None else Path(each).parent.name) for ids, each in pairs]

    def release(self) -> None:
        """Let the engine answer what it holds, now and later."""
        (self.run / "release").touch()


@pytest.fixture
def desk(tiny, tmp_path) -> Iterator[Desk]:
    with ExitStack() as opened:
        yield open_desk(tiny(), tmp_path, opened)


def open_desk(
    folder: str, run: Path, opened: ExitStack, adapters: int = 2, engine: str = "vllm", **more: Any
) -> Desk:
    (run / "weights").mkdir(parents=True, exist_ok=True)
    journal = CallJournal(run)
    opened.callback(journal.close)
    reader = RowReader(load_config([f"model.path={folder}"]), folder, read_sizes(folder))
    stops = StopWords((), {}.get)
    bounds = SampleBounds(4, 64, "the engine", engine_kind("vllm").min_temperature)
    prefetcher = RequestPrefetcher(journal, reader, stops, bounds, 1)
    engines = EngineThread()
    opened.callback(engines.close)
    options = options_of(run) | more
    settings = EngineSettings(
        python_of(run), folder, max_len=64, lora_rank=8, adapters=adapters, options=options
    )
    engines.start(EngineConfig(engine), settings, lambda: None)
    engine_sampling = EngineSampling(engines, journal, prefetcher, folder)
    engine_sampling.start()
    opened.callback(engine_sampling.close)
    return Desk(
        run, folder, journal, engine_sampling, engines, journal.create_session("", {}, None)
    )


def drawn_by(seed: int, n: int = 1, weights: int = 0) -> list[list[int]]:
    """What the stand-in answers."""
    return [[(_spread_seed(seed) + k) % VOCAB, *ids_of(weights, VOCAB)] for k in range(n)]


def adapter(desk: Desk, name: str) -> int:
    return number_of(contents(str(desk.run / "weights" / name / FORM)))


def test_calls_join_those_that_are_under_way(desk):
    """Of many keys; each is answered once, by its own seeds."""
    base = desk.sampler()
    held = [desk.ask(base, HELD, seed) for seed in range(3)]
    until(lambda: len(desk.asked) == 3)
    quick = [desk.ask(base, 1, seed, n=2, key=f"{seed % 5}") for seed in range(60)]
    for seed, promise in enumerate(quick):
        assert desk.answer(promise) == drawn_by(seed, 2)
    assert not any(map(desk.outcome, held))
    desk.release()
    assert [desk.answer(promise) for promise in held] == [drawn_by(seed) for seed in range(3)]
    assert len(desk.asked) == 63
    until(lambda: not desk.engine_sampling.tasks and not desk.engine_sampling.admission.inside)
    assert desk.engine_sampling.samples == 123


def test_adapters_are_drawn_with_side_by_side(desk):
    """Two at a time, beside the base model. The third waits, and nobody comes in before it."""
    names = ("a", "b", "c")
    a, b, c = (desk.sampler(name, rank=4) for name in names)
    held = [desk.ask(each, HELD, seed) for seed, each in enumerate((a, b, desk.sampler()))]
    until(lambda: len(desk.asked) == 3)
    assert desk.answer(desk.ask(b, 1, 7)) == drawn_by(7, 1, adapter(desk, "b"))
    third = desk.ask(c, 1, 8)
    later = desk.ask(c, 1, 9)
    waits = desk.engine_sampling.admission.wants
    until(lambda: later in waits or later in desk.engine_sampling.tasks)
    desk.engines.submit(asyncio.sleep(0)).result()  # the turn of the loop in which it came is over
    assert set(waits) == {third, later}
    desk.release()
    for seed, (promise, name) in enumerate(zip(held, (*names[:2], ""), strict=True)):
        weights = adapter(desk, name) if name else 0
        assert desk.answer(promise) == drawn_by(seed, 1, weights)
    assert desk.answer(third) == drawn_by(8, 1, adapter(desk, "c"))
    assert desk.answer(later) == drawn_by(9, 1, adapter(desk, "c"))
    assert len({adapter(desk, name) for name in names}) == 3
    first = [place for place, (_, name) in enumerate(desk.asked) if name == "c"]
    assert first == [4, 5]


def test_whole_weights_take_turns(desk):
    """What is under way is finished first, with what it was begun with."""
    base, x, y = desk.sampler(), desk.sampler("x"), desk.sampler("y")
    held = desk.ask(base, HELD, 1)
    until(lambda: len(desk.asked) == 1)
    promises = [desk.ask(x, 1, 2), desk.ask(y, 1, 3), desk.ask(x, 1, 4)]
    another = desk.ask(desk.sampler("a", rank=4), 1, 5)
    desk.release()
    assert desk.answer(held) == drawn_by(1)
    for seed, name, promise in zip((2, 3, 4), "xyx", promises, strict=True):
        assert desk.answer(promise) == drawn_by(seed, 1, adapter(desk, name))
    assert desk.answer(another) == drawn_by(5, 1, adapter(desk, "a"))
    assert desk.answer(desk.ask(base, 1, 6)) == drawn_by(6)


def test_whole_weights_outlive_their_snapshot_in_the_engine(desk):
    """An engine that dies is given them again, though the journal has forgotten them; with the next
    ones they go."""
    x = desk.sampler("x")
    weights = adapter(desk, "x")
    held = desk.ask(x, HELD, 1)
    until(lambda: len(desk.asked) == 1)
    shutil.rmtree(desk.run / "weights" / "x")
    [replica] = desk.engines.engine.replicas
    os.kill(replica.engine.child.process.pid, signal.SIGKILL)
    until(lambda: len(desk.asked) == 2)
    desk.release()
    assert desk.answer(held) == drawn_by(1, 1, weights)
    assert desk.answer(desk.ask(desk.sampler("y"), 1, 2)) == drawn_by(2, 1, adapter(desk, "y"))
    assert [each.name for each in (desk.run / FORM).iterdir()] == ["2"]
    assert desk.answer(desk.ask(desk.sampler(), 1, 3)) == drawn_by(3)
    assert not list((desk.run / FORM).iterdir())


def test_others_wait_for_whole_weights_that_wait(desk):
    """The base model's own would keep them out for ever otherwise."""
    base, x = desk.sampler(), desk.sampler("x")
    held = desk.ask(base, HELD, 1)
    until(lambda: len(desk.asked) == 1)
    waits = desk.ask(x, 1, 2, key="other")
    inside = desk.engine_sampling.admission.inside
    for seed in range(10, 14):  # until its key's turn has come
        promise = desk.ask(base, 1, seed, key="one")
        until(lambda promise=promise: desk.outcome(promise) or len(inside) == 1)
    desk.release()
    assert desk.answer(held) == drawn_by(1)
    assert desk.answer(waits) == drawn_by(2, 1, adapter(desk, "x"))


def test_snapshots_that_cannot_be_given_fail_alone(desk):
    broken, whole = desk.sampler("broken", rank=4), desk.sampler("whole")
    for name in ("broken", "whole"):
        shutil.rmtree(desk.run / "weights" / name / FORM)
    failure = desk.failure(desk.ask(broken, 1, 2))
    assert failure.category == "server" and "RUN/checkpoints/step-" in failure.text
    assert desk.answer(desk.ask(desk.sampler(), 1, 3)) == drawn_by(3)
    failures = [desk.failure(desk.ask(whole, 1, seed)) for seed in (4, 5)]
    assert {each.category for each in failures} == {"server"}
    assert desk.answer(desk.ask(desk.sampler(), 1, 6)) == drawn_by(6)


def test_a_prompt_that_kills_engines_fails_alone(desk):
    """Those that were under way with it, each time, are answered, and the service goes on."""
    base = desk.sampler()
    slow = [desk.ask(base, SLOW, seed) for seed in range(4)]
    deadly = desk.ask(base, DEADLY, 1)
    failure = desk.failure(deadly)
    assert failure.category == "server" and "the 3 times" in failure.text
    assert [desk.answer(promise) for promise in slow] == [drawn_by(seed) for seed in range(4)]
    desk.engine_sampling.check()


def test_an_engine_that_is_given_up_fails_samples_and_no_more(desk):
    """After five deaths without an answer."""
    base = desk.sampler()
    failures = [desk.failure(desk.ask(base, DEADLY, seed)) for seed in range(3)]
    failures.append(desk.failure(desk.ask(base, 1, 2)))
    assert {each.category for each in failures} == {"server"}
    assert "is not started again" in failures[-1].text
    desk.engine_sampling.check()


def test_what_a_client_cancels_is_not_drawn_on(desk):
    base = desk.sampler()
    held, other = desk.ask(base, HELD, 1), desk.ask(base, HELD, 2)
    until(lambda: len(desk.asked) == 2)
    assert desk.journal.cancel(held, "local")
    until(lambda: list(desk.engine_sampling.tasks) == [other])
    desk.release()
    assert desk.answer(other) == drawn_by(2)
    assert desk.failure(held).text == "the client cancelled it"
    until(lambda: not desk.engine_sampling.tasks and not desk.engine_sampling.admission.inside)


def test_tokens_are_told_while_they_are_drawn(desk):
    """To those who want them, each to its own request, and to nobody who has gone."""
    heard: dict[str, list[Any]] = {}

    def hear(call: Call, pieces: Any) -> None:
        heard.setdefault(call.request_id, []).append(pieces)

    desk.engine_sampling.hear = hear
    base, stream = desk.sampler(), {"stream_tokens": True}
    first = desk.ask(base, HELD, 1, n=2, more=dict(stream))
    until(lambda: first in heard)
    [[one], [two]] = drawn_by(1, 2)[0][:1], drawn_by(1, 2)[1][:1]
    assert heard == {first: [[[0, [one]], [0, [two]]]]}
    silent = desk.ask(base, HELD, 2)
    gone = desk.ask(base, HELD, 3, more=dict(stream))
    until(lambda: len(heard.get(first, [])) == 2 and gone in heard)
    assert heard[first][1] == [[1, [one + 1]], [1, [two + 1]]]
    assert desk.journal.cancel(gone, "local")
    until(lambda: gone not in desk.engine_sampling.tasks)
    last = desk.ask(base, HELD, 4, more=dict(stream))
    until(lambda: last in heard)
    desk.release()
    assert [desk.answer(each) for each in (first, silent)] == [drawn_by(1, 2), drawn_by(2)]
    assert len(heard[gone]) == 1 and silent not in heard


def test_mistakes_are_the_clients(desk):
    sampler = desk.sampler()
    for said, ids, params in (
        ("tokens[0]=99999", [99999], {}),
        ("sampling_params.temperature=0.001", [5], {"temperature": 0.001}),
        ("70 tokens, and the engine takes 64", [3] * 70, {}),
    ):
        failure = desk.failure(desk.ask(sampler, *ids, more={"params": params}))
        assert failure.category == "user" and said in failure.text, said


def test_a_session_that_has_ended_is_an_error(desk):
    failure = desk.failure(desk.ask("no such session", 1, 2))
    assert (failure.category, failure.text) == (
        "user",
        "sampling_session_id: the session has ended",
    )


def test_what_only_the_ranks_can_say_waits_for_them(desk):
    """With the answers, which are drawn once. At temperature 0 an engine says all."""
    base = desk.sampler()
    for number, more in enumerate(
        (
            {"params": {"temperature": 0.7}},
            {"prompt_logprobs": True},
            {"topk_sample_logprobs": 2},
            {"topk_prompt_logprobs": 2},
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        ),
        start=1,
    ):
        promise = desk.ask(base, 1, 5, more=dict(more))
        _, ask = until(lambda promise=promise: desk.engine_sampling.drawn.get(promise))
        assert [list(each.ids) for each in ask.answers] == drawn_by(5), more
        assert desk.outcome(promise) is None, more
        assert desk.answer(desk.ask(base, 1, 6, more={"params": {"temperature": 0.0}}))
        desk.journal.finish(promise, Outcome(b"by the ranks", "protobuf"))
        until(lambda: not desk.engine_sampling.drawn)
        assert desk.outcome(promise) == Outcome(b"by the ranks", "protobuf"), more
        assert len(desk.asked) == 2 * number, more


@pytest.mark.full
def test_what_was_under_way_is_drawn_by_the_next_service(tiny, tmp_path):
    """With the same seeds, also where the client named none; and it does not count as an attempt,
    however often the service dies."""
    with ExitStack() as opened:
        desk = open_desk(tiny(), tmp_path, opened)
        base, adapted = desk.sampler(), desk.sampler("a", rank=4)
        promises = [desk.ask(base, HELD, 1), desk.ask(adapted, HELD, 2)]
        until(lambda: len(desk.asked) == 2)
        weights = adapter(desk, "a")
    for again in range(3):
        with ExitStack() as opened:
            desk = open_desk(tiny(), tmp_path, opened)
            until(lambda desk=desk, again=again: len(desk.asked) == 2 * (again + 2))
            assert [call.attempts for call in desk.journal.open_calls()] == [0, 0]
    with ExitStack() as opened:
        desk = open_desk(tiny(), tmp_path, opened)
        desk.release()
        found = [desk.answer(promise) for promise in promises]
        assert found == [drawn_by(1), drawn_by(2, 1, weights)]


def test_what_goes_wrong_here_ends_the_service(desk):
    """It would wait for ever."""
    desk.engine_sampling.check()
    held = desk.ask(desk.sampler(), HELD, 1)
    until(lambda: desk.engine_sampling.tasks)

    def full(*_: Any) -> Any:
        raise OSError("the disk is full")

    desk.journal.finish_all = full
    desk.release()
    until(lambda: desk.engine_sampling.broken)
    with pytest.raises(OSError, match="the disk is full"):
        desk.engine_sampling.check()
    del desk.journal.finish_all
    assert desk.outcome(held) is None


# -- who comes in


def call(number: int, key: str = "local", size: int = 0) -> Call:
    return Call(SAMPLE, "owner", number, key, request_id=f"{number}", number=number, size=size)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


BASE, X = SampleWeights(), SampleWeights(whole=Path("x"))


def come_in(admission: Admission, swap_s: float = 0.0) -> list[Call]:
    """All that fit, where the base model's weights are there."""
    entered = []
    admission.count()
    while (asked := admission.next(None, swap_s)) is not None and asked[1].whole is None:
        admission.enter(*asked)
        entered.append(asked[0])
    return entered


def waiting(clock: Clock, *calls: Call, engines: int = 1) -> Admission:
    admission = Admission(Capacity(512 * engines, 0, adapters=2), clock)
    for each in calls:
        admission.wait(each, BASE)
    return admission


def test_keys_come_in_by_turns():
    """Though one has asked for hundreds before the other's first; of a key in their order."""
    many = [call(number, "many") for number in range(300)]
    entered = come_in(waiting(Clock(), *many, *(call(n, "few") for n in range(300, 310))))
    keys = [each.key for each in entered]
    assert len(keys) == 310 and keys[:20].count("few") == 10
    assert [each for each in entered if each.key == "many"] == many


def test_there_is_room_for_so_many():
    calls = [call(number) for number in range(2000)]
    admission = waiting(Clock(), *calls, engines=2)
    assert come_in(admission) == calls[:1024]
    admission.leave(calls[7])
    admission.forget(calls[1024].request_id)
    assert come_in(admission) == [calls[1025]]


def test_so_many_adapters_are_under_way():
    """And nobody comes in before the next one, whose turn it is, has room."""
    snapshots = [SampleWeights(adapter=Path(name)) for name in "abc"]
    admission = Admission(Capacity(512, 0, adapters=2), Clock())
    for number in range(6):
        admission.wait(call(number), snapshots[number // 2])
    entered = come_in(admission)
    assert [each.number for each in entered] == [0, 2]
    admission.leave(entered[0])
    assert [each.number for each in come_in(admission)] == [4]


def test_bodies_take_so_much_room_but_one_has_it_in_any_case():
    calls = [call(number, size=400 * 2**20) for number in range(3)]
    admission = waiting(Clock(), *calls)
    assert come_in(admission) == calls[:1]
    admission.leave(calls[0])
    assert come_in(admission) == calls[1:2]


def test_other_weights_come_when_those_there_have_had_their_time():
    """Four times what the change takes; meanwhile nobody is kept out, then everybody."""
    clock, numbers = Clock(), count(1000)
    admission = waiting(clock)
    admission.wait(call(1, "other"), X)

    def come() -> int:
        """How many come in of two that want what is there."""
        for _ in range(2):
            admission.wait(call(next(numbers), "one"), BASE)
        return len(come_in(admission, swap_s=2.0))

    begun = clock.now
    while come() == 2:
        clock.now += 0.5
    assert 8.0 <= clock.now - begun <= 9.0
    for one in list(admission.inside.values()):
        assert admission.next(None, 2.0) is None and come() == 0
        admission.leave(one.call)
    assert admission.next(None, 2.0) == (call(1, "other"), X)
    assert [each.number for each in admission.all_of(X)] == [1]


# -- a whole service


def settings(folder: Path, given: Any = None) -> list[str]:
    options = ",".join(f"{name}:{value}" for name, value in (given or options_of(folder)).items())
    engine = [f"engine.python={python_of(folder)}", f"engine.options={{{options}}}"]
    return ["engine.name=vllm", "engine.max_len=64", "serve.max_rank=8", *engine]


@dataclass
class Life:
    """A service that is ended and started again, and a client of it."""

    path: str
    folder: Path
    opened: ExitStack
    port: int = field(default_factory=free_port)
    more: tuple[str, ...] = ()
    tree: ProcessTree | None = None

    def start(self) -> Any:
        given = [*settings(self.folder), *self.more]
        running = start(self.path, self.folder / "run", self.port, *given, tree=self.tree)
        self.opened.callback(running.kill)
        return running

    def client(self) -> Client:
        found = Client(f"http://127.0.0.1:{self.port}", self.path, patience_s=60)
        return self.opened.enter_context(found)

    def asked(self, *ids: int) -> int:
        """How often the engine was asked this prompt."""
        file = self.folder / "asked"
        found = map(json.loads, lines(self.folder)) if file.exists() else ()
        return sum(each == list(ids) for each, _ in found)

    def release(self) -> None:
        (self.folder / "release").touch()


@pytest.fixture
def life(tiny, tmp_path) -> Iterator[Life]:
    with ExitStack() as opened:
        yield Life(tiny(), tmp_path, opened)


SHORT = dict(seed=3, max_tokens=4)


def weights_of(answer: Any) -> int:
    """The number of the weights that the stand-in had, of which it says three ids."""
    [[seed, *ids]] = tokens_of(answer)
    assert seed == _spread_seed(3) % VOCAB and len(ids) == 3
    return sum(id * VOCAB**place for place, id in enumerate(ids))


def step(model: Model) -> None:
    model.gradients([([[1, 2, 3, 4]], {"target_tokens": np.array([5, 6, 7, 8])})])
    model.step(learning_rate=1e-2)


@pytest.mark.slow
def test_samples_outlive_the_service_and_do_not_hold_up_training(life):
    """Snapshots are as they were saved, also for an engine that begins after a kill."""
    running, client = life.start(), life.client()
    model, whole = client.model(4, seed=1), client.model(0)
    step(model)
    step(whole)
    first, full, base = model.sampler(), whole.sampler(), client.sampler(base_model=life.path)
    held = [each.ask([[HELD, 2]], **SHORT) for each in (first, base)]
    until(lambda: life.asked(HELD, 2) == 2)
    for _ in range(3):  # while these wait
        step(model)
    second = model.sampler()
    numbers = [weights_of(each.sample([[1, 2]], **SHORT)) for each in (first, second, base)]
    running.kill()
    running = life.start()
    until(lambda: life.asked(HELD, 2) == 4)
    step(model)
    life.release()
    assert [weights_of(client.sampled(each)) for each in held] == [numbers[0], numbers[2]]
    numbers.append(weights_of(full.sample([[1, 2]], **SHORT)))
    assert numbers[2] == 0 and len(set(numbers)) == 4
    # Told to stop, it does not wait for the engine.
    (life.folder / "release").unlink()
    left = base.ask([[HELD, 3]], **SHORT)
    until(lambda: life.asked(HELD, 3))
    assert running.stop(signal.SIGTERM) == 75
    life.release()
    life.start()
    assert weights_of(client.sampled(left)) == 0
    said = (life.folder / "run" / "said.txt").read_text()
    assert "Traceback" not in said, said


@pytest.mark.full
def test_the_ranks_complete_what_the_engine_has_drawn(life, process_tree):
    """By the snapshot that it was drawn with. And a prompt that ends the engine does not end the
    service."""
    life.tree = process_tree
    life.start()
    client = life.client()
    model = client.model(4, seed=1)
    step(model)
    sampler = model.sampler()
    scored = sampler.log_probs([[1, 2, 3]])
    step(model)
    assert np.isnan(scored[0]) and np.isfinite(scored[1:]).all()
    assert np.array_equal(sampler.log_probs([[1, 2, 3]]), scored, equal_nan=True)
    plain = sampler.sample([[1, 2]], **SHORT)
    tempered = sampler.sample([[1, 2]], **SHORT, temperature=0.5)
    assert tokens_of(plain) == tokens_of(tempered)
    assert log_probs_of(plain) == [[-1.0, -2.0, -3.0, -4.0]] != log_probs_of(tempered)
    again = sampler.sample([[1, 2]], 1, {"topk_sample_logprobs": 512}, **SHORT, temperature=0.5)
    top = again.sequences[0].topk_sampled_logprobs
    ids, values = np.frombuffer(top.token_ids, "<i4"), np.frombuffer(top.logprobs, "<f4")
    for place, (token, value) in enumerate(
        zip(tokens_of(again)[0], log_probs_of(again)[0], strict=True)
    ):
        found = dict(zip(ids.reshape(4, -1)[place], values.reshape(4, -1)[place], strict=True))
        assert abs(found[token] - value) < 5e-6  # measured: 4.8e-7
    with pytest.raises(FailedError, match=r"server: a prompt of 2 tokens: .* 3 times"):
        sampler.sample([[DEADLY, 2]], **SHORT)
    assert tokens_of(sampler.sample([[1, 2]], **SHORT)) == tokens_of(plain)


def lines(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


@pytest.mark.slow
def test_a_service_that_is_told_to_stop_does_not_wait_for_its_engines(tiny, tmp_path):
    """On every rank, though they never load."""
    options = {**options_of(tmp_path), "loads": str(tmp_path / "never")}
    command = [sys.executable, "-m", "megatron_vlm.cli", "serve", f"model.path={tiny()}"]
    command += [f"run={tmp_path / 'run'}", "platform=cpu", "serve.port=0", "parallel.pp=2"]
    said = tmp_path / "said.txt"
    with said.open("wb") as file:
        process = subprocess.Popen([*command, *settings(tmp_path, options)], stderr=file)
    try:
        until(lambda: running_engines(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 75, said.read_text()
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert said.read_text().endswith(f"megatron-vlm: {STOPPED_EARLY}\n"), said.read_text()
    assert "Traceback" not in said.read_text(), said.read_text()


def running_engines(pid: int) -> list[int]:
    """Those of a service."""
    found = []
    for each in descendants(pid):
        with suppress(OSError):
            if STAND_IN.name in Path(f"/proc/{each}/cmdline").read_text():
                found.append(each)
    return found


@pytest.mark.slow
def test_all_ranks_complete_what_the_engine_has_drawn(life):
    """At PP2 as in one process."""
    life.start()
    found = tempered_of(life)
    life.more = ("parallel.pp=2",)
    life.folder = life.folder / "pp2"
    life.folder.mkdir()
    life.port = free_port()
    life.start()
    assert tempered_of(life) == pytest.approx(found, abs=5e-6)  # measured: 9.5e-7


def tempered_of(life: Life) -> list[float]:
    client = life.client()
    model = client.model(4, seed=1)
    step(model)
    [found] = log_probs_of(model.sampler().sample([[1, 2]], **SHORT, temperature=0.5))
    return [*found, *model.sampler().log_probs([[1, 2, 3]])[1:]]


@pytest.mark.slow
def test_forms_for_the_engine_are_made_once(life):
    """Inside the snapshot, with which they go; a model may begin with it as before."""
    life.start()
    client = life.client()
    path = client.model(4).save("one")
    samplers = [client.sampler(model_path=path) for _ in range(2)]
    assert len({weights_of(each.sample([[1, 2]], **SHORT)) for each in samplers}) == 1
    [form] = (life.folder / "run" / "weights").glob(f"*/{FORM}")
    assert {Path(json.loads(line)[1]) for line in lines(life.folder)} == {form}
    files = {each.name for each in form.iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors"}
    step(client.loaded(path, True))


# -- settings


REFUSALS = {
    "engine.python is not set": (["engine.name=vllm"], "engine.python is not set"),
    "no engine": (["engine.python=/usr/bin/python3"], "engine.name=own starts no engine"),
    "gpus": (["engine.devices=[1]"], "engine.name=own starts no engine"),
    "options": (["engine.options={a:1}"], "engine.name=own starts no engine"),
    "no dict": (["engine.options=3"], "engine.options=3; give {NAME: VALUE}"),
    "new tokens": (
        ["engine.name=vllm", "engine.python=python", 'data.add_tokens=["<a>"]'],
        "engine.name=vllm starts an engine from model.path, which lacks the tokens",
    ),
    "ranks": (
        ["engine.name=vllm", "engine.python=python", "serve.max_rank=513"],
        "serve.max_rank=513 exceeds",
    ),
    "muon": (["optim=muon"], "optim.name=muon: clients send settings of AdamW"),
    "length": (["engine.max_len=0"], "engine.max_len=0; give"),
    "head": (["model.mtp=train"], "model.mtp=train: clients choose the losses"),
    "drafts": (["engine.draft_tokens=1"], "engine.draft_tokens=1 needs an engine that drafts"),
    "sampler": (["engine.name=sglang"], "engine.name=sglang; give own or vllm"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused_at_once(tiny, name):
    given, said = REFUSALS[name]
    with pytest.raises(ConfigError) as refused:
        check_serve(cfg := load_config([f"model.path={tiny()}", *given]))
        check_engine(cfg, "serve")
    assert said in str(refused.value)


@pytest.mark.slow
def test_an_engine_without_vllm_ends_the_service(tiny, tmp_path):
    """Before anybody could reach it."""
    given = ["engine.name=vllm", f"engine.python={sys.executable}", "serve.max_rank=8"]
    with pytest.raises(AssertionError, match=f"python={sys.executable} "):
        start(tiny(), tmp_path / "run", free_port(), *given)
    assert os.path.exists(tmp_path / "run" / "said.txt")


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (128, 128), (300, 320)])
def test_vllm_makes_room_for_ranks_of_its_own(rank, room):
    assert rank_for(rank) == room
