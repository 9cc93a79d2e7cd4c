# .venv/bin/python -m pytest tests/serve/test_sample_turns.py
"""Samples of a service: what holds for each request, whoever draws it. `own` draws on ranks without
a model; `uniform` is an engine that a package registers by its name alone, and the ranks complete
what it has drawn. Both draw the same tokens by the same seeds."""

import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.config import load_config
from megatron_vlm.config.schema import Config, EngineConfig
from megatron_vlm.data.tensors.tensor_batch import rows_of
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.family import read_sizes
from megatron_vlm.serve.engine_samples import EngineSampling
from megatron_vlm.serve.failures import CallFailedError
from megatron_vlm.serve.journal.journal_records import Failure, Outcome
from megatron_vlm.serve.protocol.protobuf import message
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.serve.resumable_decoder import SampleProgress, SampleRequest
from megatron_vlm.serve.sample_calls import SampleBounds, StopWords, _spread_seed
from megatron_vlm.serve.service import Service
from tests.serve.test_vllm_samples import PATIENCE_S, Desk, until
from tests.support.fake_calls import CallJournal
from tests.support.serve_client import log_probs_of
from tests.support.uniform_engine import IDS, registered

BAD = 77  # a token of which the ranks cannot compute log-probs
FLAT = -math.log(len(IDS))


@dataclass
class Ranks:
    """Ranks without a model. Log-probs at a temperature other than 1 are its negative."""

    cfg: Config
    between: Callable[[], None] = lambda: None  # called between turns
    interrupts: bool = False  # whether a signal comes while the ranks work
    decoders: dict[str, dict[int, tuple[SampleRequest, int]]] = field(default_factory=dict)
    joined: list[int] = field(default_factory=list)  # the last token of each prompt
    left: list[int] = field(default_factory=list)  # numbers of requests that were cancelled
    ends: float = field(default_factory=lambda: time.monotonic() + 5 * PATIENCE_S)

    def __post_init__(self) -> None:
        self.base = SimpleNamespace(dims=ParallelDims.create(self.cfg.parallel, 1, 8))

    @property
    def models(self) -> "Ranks":
        return self

    def wait(self) -> None:
        assert time.monotonic() < self.ends
        self.between()

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.interrupts:
            raise Stopped
        return method(*arguments)

    def draw(
        self, name: str, prompts: Any, requests: Sequence[Any], leave: Sequence[int], rounds: int
    ) -> list[SampleProgress]:
        inside = self.decoders.setdefault(name, {})
        self.left += leave
        for number in leave:
            del inside[number]
        self.joined += [int(row.ids_S[-1]) for row in (rows_of(prompts) if prompts else [])]
        inside |= {each["number"]: (SampleRequest.from_json(each), 0) for each in requests}
        progress = []
        for number, (asked, tokens) in list(inside.items()):
            tokens, answers = min(tokens + rounds, asked.settings.max_tokens), None
            inside[number] = asked, tokens
            if tokens == asked.settings.max_tokens:
                answers = [_drawn(asked, k).as_json() for k in range(asked.n)]
                del inside[number]
            left = 0 if answers else asked.n
            progress.append(SampleProgress(number, asked.n * tokens, left, answers))
        if not inside:
            del self.decoders[name]
        return progress

    def forward(self, name: str, batch: Any, temperature: float = 1.0) -> list[Tensor]:
        rows = rows_of(batch)
        if any(BAD in row.ids_S for row in rows):
            raise CallFailedError("it cannot be computed")
        value = FLAT if temperature == 1 else -temperature
        shapes = [(len(row.ids_S), *([] if row.targets is None else [1])) for row in rows]
        return [torch.full(shape, value) for shape in shapes]


def _drawn(asked: SampleRequest, k: int) -> Completion:
    settings = asked.settings
    ids = tuple(Random(asked.seed + k).choices(IDS, k=settings.max_tokens))
    value = FLAT if settings.temperature == 1 else -settings.temperature
    return Completion(ids, (value,) * len(ids), "length")


@dataclass(kw_only=True)
class Office(Desk):
    """A service whose ranks have no model."""

    engine: str
    cfg: Config
    prefetcher: RequestPrefetcher
    ranks: Any = None
    service: Any = None

    def begin(self) -> None:
        """Begin to serve what is in the journal."""
        self.ranks = Ranks(self.cfg)
        parts = self.ranks, self.journal, self.prefetcher, self.engine_sampling
        self.service = Service(self.cfg, *parts)

    def serve(self, *promises: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Serve until these have results."""

        def between() -> None:
            meanwhile()
            if all(map(self.outcome, promises)):
                raise Stopped

        self.ranks.between = between
        with pytest.raises(Stopped):
            self.service.run()

    def log_probs(self, promise: str) -> list[list[float]]:
        found = self.outcome(promise)
        assert isinstance(found, Outcome), found
        answer = message("SampleResponse")
        answer.ParseFromString(found.content)
        return log_probs_of(answer)

    def is_begun(self, promise: str) -> bool:
        """Whether the ranks have begun to draw it, or wait to complete what is drawn."""
        drawing, pending = self.service.drawing, self.service.scheduler.pending()
        [call] = [each for each in pending if each.request_id == promise] or [None]
        return call is not None and (drawing is not self.turns or drawing.is_in_progress(call))

    @property
    def turns(self) -> Any:
        return self.service.runner.sample_turns


@pytest.fixture(params=["own", "uniform"])
def office(request, tiny, tmp_path) -> Iterator[Office]:
    folder, settings = tiny(), ("serve.sampling_seconds=1e-9", "engine.rows=4")
    cfg = load_config([f"model.path={folder}", f"run={tmp_path}", *settings])
    (tmp_path / "weights").mkdir()
    with ExitStack() as opened:
        journal = CallJournal(tmp_path)
        opened.callback(journal.close)
        bounds = SampleBounds(4, 64)
        reader = RowReader(cfg, folder, read_sizes(folder))
        prefetcher = RequestPrefetcher(journal, reader, StopWords((), {}.get), bounds, 1)
        sampling, engines = None, EngineThread()
        opened.callback(engines.close)
        if request.param != "own":
            opened.enter_context(registered(tmp_path))
            engines.start(EngineConfig(request.param), EngineSettings("", folder), lambda: None)
            sampling = EngineSampling(engines, journal, prefetcher, folder)
            sampling.start()
            opened.callback(sampling.close)
        opened.callback(prefetcher.close)
        session = journal.create_session("", {}, None)
        facts = {"engine": request.param, "cfg": cfg, "prefetcher": prefetcher}
        office = Office(tmp_path, folder, journal, sampling, engines, session, **facts)
        office.begin()
        yield office


def drawn_by(seed: int, n: int = 1, tokens: int = 4) -> list[list[int]]:
    first = _spread_seed(seed)
    return [Random(first + k).choices(IDS, k=tokens) for k in range(n)]


def test_each_request_gets_the_answers_of_its_seeds(office):
    """With the log-probs of its temperature and of its prompt; the ranks draw what no engine has
    drawn, once each."""
    base, promises = office.sampler(), []
    for place in range(24):
        params = {"max_tokens": 1 + 9 * place, "temperature": (1.0, 0.5)[place % 2]}
        more = {"params": params, "prompt_logprobs": place % 3 == 0}
        promises.append(
            office.ask(base, 5, place, key="abc"[place % 3], n=1 + place % 2, more=more)
        )
    gone = office.ask("no such session", 1, 2)
    office.serve(*promises, gone)
    for place, promise in enumerate(promises):
        count, tokens = 1 + place % 2, min(1 + 9 * place, 62)
        assert office.answer(promise) == drawn_by(place, count, tokens)
        value = (FLAT, -0.5)[place % 2]
        assert office.log_probs(promise) == [pytest.approx([value] * tokens)] * count
    assert "the session has ended" in office.failure(gone).text
    assert sorted(office.ranks.joined) == (list(range(24)) if office.engine == "own" else [])
    figures = office.service.gauges
    assert (figures["samples_total"], figures["samples_under_way"]) == (36, 0)
    assert not office.ranks.decoders and not office.service.prefetcher.futures


def test_one_that_the_ranks_cannot_complete_fails_alone(office):
    base, more = office.sampler(), {"prompt_logprobs": True}
    promises = [office.ask(base, *ids, more=dict(more)) for ids in ([5, 1], [BAD, 2], [5, 3])]
    office.serve(*promises)
    assert office.failure(promises[1]) == Failure("it cannot be computed", "server")
    assert [office.answer(promises[place]) for place in (0, 2)] == [drawn_by(1), drawn_by(3)]


def test_who_cancels_leaves(office):
    """Between two turns, or before the ranks complete what is drawn; the others stay."""
    base, more = office.sampler(), {"prompt_logprobs": True, "params": {"max_tokens": 60}}
    leaves, stays = (office.ask(base, 5, seed, more=dict(more)) for seed in (1, 2))

    def cancel() -> None:
        if office.outcome(leaves) is None and office.is_begun(leaves):
            assert office.journal.cancel(leaves, "local")

    if office.engine != "own":
        until(lambda: office.is_begun(leaves))
    office.serve(leaves, stays, meanwhile=cancel)
    assert office.failure(leaves).text == "the client cancelled it"
    assert office.answer(stays) == drawn_by(2, tokens=60)
    assert len(office.ranks.left) == (office.engine == "own")


def test_a_service_that_stops_leaves_no_attempts(office):
    """So that it may stop as often as it likes, and draws the same afterwards."""
    base, more = office.sampler(), {"prompt_logprobs": True}
    promises = [office.ask(base, 5, seed, more=dict(more)) for seed in range(3)]
    for _ in range(4):
        office.ranks.interrupts = True
        office.serve(*promises)
        assert [call.attempts for call in office.journal.open_calls()] == [0, 0, 0]
        office.begin()
    office.serve(*promises)
    assert [office.answer(promise) for promise in promises] == [drawn_by(n) for n in range(3)]


@pytest.mark.parametrize("office", ["own"], indirect=True)
def test_keys_join_by_turns_on_the_ranks(office):
    """Though one has asked for many before the other's first."""
    base, more = office.sampler(), {"params": {"max_tokens": 60}}
    many = [office.ask(base, 5, seed, key="many", more=dict(more)) for seed in range(9)]
    few = [office.ask(base, 5, seed, key="few", more=dict(more)) for seed in (10, 11)]
    office.serve(*many, *few)
    assert office.ranks.joined == [0, 10, 1, 11, *range(2, 9)]


def test_results_wait_for_a_full_disk(office, monkeypatch):
    """And are written once it has room."""
    monkeypatch.setattr("megatron_vlm.serve.failures.PAUSE_S", 0.0)
    journal, fails = office.journal, [sqlite3.OperationalError("database or disk is full")] * 3
    finish_all = journal.finish_all

    def finish(finished: Sequence[Any]) -> list[bool]:
        if finished and fails:
            raise fails.pop()
        return finish_all(finished)

    monkeypatch.setattr(journal, "finish_all", finish)
    promises = [office.ask(office.sampler(), 5, seed) for seed in range(3)]
    office.serve(*promises)
    assert [office.answer(promise) for promise in promises] == [drawn_by(n) for n in range(3)]
    assert not fails
