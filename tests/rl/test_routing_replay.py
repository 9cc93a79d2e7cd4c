# .venv/bin/python -m pytest tests/rl/test_routing_replay.py
"""The experts that an engine chose are those of the pass, token by token and layer by layer: in the
log-probs before the step and in the gradients, and nowhere else. An engine without a model says
what it chose; test_engine.py has the real one."""

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_vlm.config import load_config
from megatron_vlm.config.schema import RlConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.errors import ConfigError
from megatron_vlm.model.constraints import check_router_keys
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.policy_update import PolicyUpdater
from megatron_vlm.rl.rollouts import next_prompts
from megatron_vlm.rl.train_batch import (
    make_train_batch,
    train_batch_from_bytes,
    train_batch_to_bytes,
)
from megatron_vlm.training import pipeline
from megatron_vlm.training.preflight import check_model
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.worker import MegatronWorker
from tests.engines.test_sampling_engines import STAND_IN
from tests.model.test_parity import layout
from tests.rl.test_rl import LEAN, lines, run_rank, words
from tests.rl.test_segments import groups_of
from tests.rl.test_train_batch import TASKS, completion, config, opened
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.fake_engine import experts_of
from tests.support.runs import Case, collect_grads
from tests.support.sets import write_set
from tests.support.suites import quick
from tests.support.uniform_engine import registered

EXPERTS, TOP_K, LAYERS, DENSE = 8, 2, 4, 1
SIZES = dict(experts=EXPERTS, top_k=TOP_K, layers=LAYERS, dense_layers=DENSE, deepstack=1)


@pytest.fixture(scope="module")
def asks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    write_set(folder, rows=7)
    return folder


def stand_in(folder: Path, **options: Any) -> list[str]:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    options = {"vocab": 200, "experts": f"[{EXPERTS},{TOP_K}]"} | options
    entries = ",".join(f"{key}:{value}" for key, value in options.items())
    return ["engine.name=vllm", f"engine.python={python}", f"engine.options={{{entries}}}"]


def watched(given: list[str]) -> tuple[Any, list[tuple[str, MicroBatch, dict[int, Tensor]]]]:
    """Run a rank. Return its results and, of each pass with rows, its kind, the micro-batch and the
    experts by layer."""
    inputs: list[StageInput] = []
    make = pipeline.stage_input

    def kept(*args: Any) -> StageInput:
        inputs.append(make(*args))
        return inputs[-1]

    with mock.patch.object(pipeline, "stage_input", kept):
        result = run_rank(given)
    passes = []
    for each in inputs:
        assert each.routing is not None
        kind = "gradient" if each.host.value_names else "score"
        if each.host.rows:  # not a filler
            passes.append((kind, each.host, each.routing.chosen))
    return result, passes


def check_experts(batch: MicroBatch, chosen: Mapping[int, Tensor]) -> None:
    """Check that all tokens but the last of each row went to the engine's experts."""
    start = 0
    for ids_S, length in zip(batch.ids_BS.tolist(), batch.lengths, strict=True):
        for number, chosen_NK in chosen.items():
            expected = [
                experts_of(token, position, number - 1, EXPERTS, TOP_K)
                for position, token in enumerate(ids_S[: length - 1])
            ]
            assert chosen_NK[start : start + length - 1].tolist() == expected
        start += length
    assert batch.columns["routing"].dtype is torch.int16
    ends_B = torch.tensor(batch.lengths).cumsum(0) - 1
    is_open_T = (batch.columns["routing"] == -1).all(-1).all(-1)
    assert is_open_T.nonzero()[:, 0].equal(ends_B)  # the router chooses for the last tokens alone


LAYOUTS = {"ep2": "parallel.ep=2", "pp2": "parallel.pp=2"}


@pytest.mark.parametrize("name", quick(["pp2"], LAYOUTS))
def test_a_pass_uses_the_table_that_the_engine_sent(name, pool, asks, tiny):
    """Episodes have several turns and pictures, and the first layer is dense. The engine leaves out
    the experts that earlier answers brought."""
    more = ["rl.replay_routing=true", f"rl.environment={TASKS}:Looks", "rl.max_tokens=400"]
    more += [*LEAN, "data.max_tokens=300", "train.steps=2", LAYOUTS[name]]
    path = tiny(from_scratch=True, **SIZES)
    ranks = pool.run(watched, 2, words(asks, path, name, *stand_in(asks), *more))
    found, layers = [], set()
    for (status, _, err), passes in ranks:
        assert status == 0, err
        for kind, batch, chosen in passes:
            found.append((kind, "routing" in batch.columns))
            layers |= set(chosen)
            if "routing" in batch.columns:
                check_experts(batch, chosen)
    assert layers == set(range(DENSE + 1, LAYERS + 1))  # numbered from 1
    replayed, own = found.count(("score", True)), found.count(("score", False))
    assert own == found.count(("gradient", True)) == len(found) // 4 > 0  # the initial model
    assert replayed == 2 * own  # with the pictures and without them
    for line in lines(asks / name, "rl"):
        assert line["turns"] > 2 and 0.5 < line["rerouted"] < 1  # random choices are seldom equal


FAULTS = {
    "layer": (r"routing.shape=\[\d+,2,2\]", "layers with experts"),
    "tokens": (r"routing.shape=\[\d+,3,2\]", "layers with experts"),
    "expert": (r"token 1 in layer 1: routing=\[8,\d\]", "different experts from 0 to 7"),
    "missing": ("routing is missing", "set rl.replay_routing=false"),
}


@pytest.mark.parametrize("fault", quick(["expert"], FAULTS))
def test_experts_that_cannot_be_are_refused_with_the_record(fault, pool, asks, tiny):
    given = words(asks, tiny(from_scratch=True, **SIZES), fault, *stand_in(asks, fault=fault))
    [((status, _, err), passes)] = pool.run(watched, 1, [*given, *LEAN, "rl.replay_routing=true"])
    assert status == 2 and not passes, err
    found, allowed = FAULTS[fault]
    message = rf"train.jsonl:\d+: the engine's answer 1: {found}.*{allowed}"
    assert re.search(message, " ".join(err.split())), err


def test_a_replay_that_cannot_be_is_refused_before_the_first_step(tiny, tmp_path):
    for name in ("own", "uniform"):  # the own decoder has the trainer's routers
        cfg = load_config(["model.path=x", f"engine.name={name}", "rl.replay_routing=true"])
        with registered(tmp_path), raises(ConfigError, key="rl.replay_routing", problem_has=name):
            check_engine(cfg, "rl")
    with raises(ConfigError, key="rl.replay_routing", found=True):
        check_router_keys(cfg, check_model(tiny()))  # a dense model
    check_router_keys(cfg, check_model(tiny(experts=4)))


def test_drafts_beside_a_replay_are_refused(pool, asks, tiny):
    """vLLM on a CPU counts the experts of rejected drafts with the answer's."""
    given = words(asks, tiny(from_scratch=True, **SIZES), "drafts", *stand_in(asks))
    more = [*LEAN, "rl.replay_routing=true", "engine.draft_tokens=1"]
    [((status, _, err), passes)] = pool.run(watched, 1, [*given, *more])
    assert status == 2 and not passes, err
    assert "engine.draft_tokens=1 would mix the experts" in " ".join(err.split())


def updates(path: str, case: Case, rows: list[Row]) -> list[Any]:
    """Return the log-probs before a step, its figures and its gradients: without a routing, with
    that of the routers, and with one that moves a token in every layer."""
    worker = MegatronWorker(case.config(path))
    rl = RlConfig(reward="a:b", max_new_tokens=40)
    engine = replace(worker.cfg.engine, name="vllm")
    worker.cfg = replace(worker.cfg, rl=rl, engine=engine)
    work = WorkModel.from_sizes(worker.source.sizes)
    own = worker.routing(rows)
    moved = [each.clone() for each in own]
    moved[0][3] = (moved[0][3] + 1) % EXPERTS
    moved[1][5] = -1
    results = []
    for tables in (None, own, moved):
        groups = groups_of(rows, is_divided=False)
        episodes = [each for group in groups for each in group.episodes]
        for number, episode in enumerate(episodes if tables else ()):
            episode.segments[0].add_routing(tables[number].short())
        batch = make_train_batch(groups, worker.cfg, work, worker.grid.dp.size)
        batch = train_batch_from_bytes(train_batch_to_bytes(batch))
        updater = PolicyUpdater(worker)
        local_rows = updater.local_rows(batch)
        values = updater.values(batch, local_rows)
        metrics = updater.gradients(batch.updates[0], local_rows, values)
        results.append((values.old, metrics, collect_grads(worker)))
    return results


REPLAYS = {"1": layout(), "ep2": layout(dp=2, ep=2), "pp2": layout(pp=2)}


@pytest.mark.parametrize("name", quick(["1"], REPLAYS))
def test_a_pass_with_the_routers_own_table_is_one_without(name, pool, tiny):
    """Also where layers are recomputed. `rerouted` counts what the routers would do otherwise."""
    case = replace(REPLAYS[name], train=dict(micro_batch_size=3))
    case = replace(case, model={"recompute": "full"})
    rows = make_rows(MIXED)
    ranks = pool.run(updates, case.world, tiny(**SIZES), case, rows)
    tokens, layers = sum(len(row.ids_S) for row in rows), LAYERS - DENSE
    for free, own, moved in ranks:
        assert free[0].keys() == own[0].keys()
        assert all(own[0][number].equal(each_N) for number, each_N in free[0].items())
        assert own[1].loss == free[1].loss
        assert [name for name in free[2] if not free[2][name].equal(own[2][name])] == []
        assert "rerouted" not in free[1].means and own[1].means["rerouted"] == 0
        share = layers / ((tokens - 1) * layers)
        assert moved[1].means["rerouted"] == pytest.approx(share)
    assert not all(a.equal(b) for a, b in zip(free[0].values(), moved[0].values(), strict=True))


@pytest.fixture(scope="module")
def looks(tiny, asks):
    """Episodes of three turns, in one row each."""
    yield from opened(
        config(asks, tiny(deepstack=1, from_scratch=True), environment=f"{TASKS}:Looks")
    )


@pytest.mark.parametrize("ended", ["stop", "length"])
def test_a_token_keeps_the_experts_of_the_request_that_first_read_it(looks, ended):
    """The last token of an answer, the token that closes a cut answer and the environment's message
    are read by the next request. Nothing reads the last token of a row."""
    asked: dict[tuple[int, ...], int] = {}

    async def sample(prompt: Row, settings: Any, seeds: Any) -> list[Any]:
        start = len(prompt.ids_S)
        if prompt.routing_SLK is not None:  # only what the answer before it has added is unknown
            former = max(end for ids, end in asked.items() if tuple(prompt.ids_S[:end]) == ids)
            assert (prompt.routing_SLK[: former - 1] >= 0).all()
            assert (prompt.routing_SLK[former - 1 :] == -1).all()
        answers = []
        for seed in seeds:
            answer = completion(looks, seed, ended)
            ids = (*prompt.ids_S.tolist(), *answer.ids)
            asked[ids] = len(ids)
            # Of each token: the length of the prompt, and its own place.
            routing_S12 = torch.stack(
                [torch.full((len(ids),), start), torch.arange(len(ids))], dim=-1
            )[:, None]
            routing_S12[-1] = -1
            answers.append(replace(answer, routing_SLK=routing_S12))
        return answers

    queue = CompletionQueue(SimpleNamespace(sample=sample), looks.settings)
    handles, _ = next_prompts(looks.data, Position(), 3)
    groups = asyncio.run(looks.play(queue, handles, step=5, first_group=0))
    batch = make_train_batch(groups, looks.cfg, looks.data.work, 1)
    for each in batch.rows:
        ids = tuple(each.row.ids_S.tolist())
        ends = sorted(end for known, end in asked.items() if ids[:end] == known)
        starts = sorted(set(each.row.routing_SLK[:-1, 0, 0].tolist()))
        assert len(ends) == len(starts) == 3 and ends[-1] == len(ids)
        assert (each.row.routing_SLK[-1] == -1).all()
        assert each.row.routing_SLK[:-1, 0, 1].tolist() == list(range(len(ids) - 1))
        first = 0
        for start, end in zip(starts, ends, strict=True):
            assert start < end
            assert (each.row.routing_SLK[first : end - 1, 0, 0] == start).all()
            first = end - 1
