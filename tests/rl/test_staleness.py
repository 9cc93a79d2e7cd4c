# .venv/bin/python -m pytest tests/rl/test_staleness.py
"""Answers whose tokens come from the weights of several steps: what is learnt from them, what a run
says of their age, and how it resumes with them."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_vlm.config.schema import EngineConfig, RlConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Checkpoint
from megatron_vlm.rl.episode import Episode, Group, Segment
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.policy_update import LogProbGap, PolicyUpdater
from megatron_vlm.rl.rollouts import Rollout, Rollouts
from megatron_vlm.rl.step_report import rl_line
from megatron_vlm.rl.train_batch import group_advantages, make_train_batch
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.engines.test_sampling_engines import STAND_IN
from tests.model.test_parity import layout
from tests.rl.test_rl import furthest, lines, run_rank, words
from tests.rl.test_train_batch import TASKS, config, opened
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import same
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, collect_grads
from tests.support.sets import write_set
from tests.support.uniform_engine import registered
from tests.training.test_losses import VOCAB
from tests.training.test_policy_losses import apart

TOLERANCE = 1e-5  # of a gradient, relative to its norm. Measured: see the test.
RL = RlConfig(reward="a.py:b", max_weight=1.1, advantage="dr_grpo", mask_weight=[0.8, 1.25])


def group_of(rows: list[Row], log_probs: Mapping[int, list[Tensor]]) -> Group:
    """Return episodes with the supervised tokens of these rows as answers. The first half of an
    answer has version 1 and its log-probs, and the rest version 3."""
    episodes = []
    for place, row in enumerate(rows):
        places = (row.labels_S != IGNORE).nonzero()[:, 0].tolist()
        first = len(places) // 2
        spans = (1, first), (3, len(places) - first)
        versions = [version for version, count in spans for _ in range(count)]
        segment = Segment(row.ids_S.tolist(), [None] * len(row.ids_S), [row])
        for token, version in zip(places, versions, strict=True):
            segment.log_probs[token] = float(log_probs[version][place][token])
        episode = Episode(place, 0, place, f"row {place}", {}, segments=[segment])
        episode.reward, episode.versions = float(place % 3), list(spans)
        episodes.append(episode)
    return Group("?", episodes)


def learn(path: str, case: Case, group: Group) -> tuple[StepMetrics, LogProbGap, dict[str, Tensor]]:
    worker = MegatronWorker(case.config(path))
    worker.cfg = replace(worker.cfg, rl=RL, engine=EngineConfig(name="vllm"))
    work = WorkModel.from_sizes(worker.source.sizes)
    batch = make_train_batch([group], worker.cfg, work, worker.grid.dp.size)
    updater = PolicyUpdater(worker)
    rows = updater.local_rows(batch)
    values = updater.values(batch, rows)
    metrics = updater.gradients(batch.updates[0], rows, values)
    gap = updater.log_prob_gap(rows, values)
    assert gap is not None
    return metrics, gap, collect_grads(worker)


@pytest.mark.parametrize("case", [layout(), pytest.param(layout(dp=2), marks=pytest.mark.full)])
def test_each_token_has_the_weight_of_the_weights_that_drew_it(case, pool, tiny, record_property):
    """The gradient is that of the formula on Hugging Face's model: sum of A min(p / s, 1.1) grad
    log p over the number of tokens, where s is the probability under the weights of the token's
    version. Tokens whose p / s is not within [0.8, 1.25] have none. Measured: 1.3e-6."""
    sizes = dict(vocab=VOCAB, **SHALLOW)
    rows, models = (
        make_rows(MIXED, VOCAB),
        {seed: load_reference(tiny(seed=seed, **sizes)) for seed in (1, 3)},
    )
    with torch.no_grad():
        log_probs = {
            seed: [row_log_probs(model, row) for row in rows] for seed, model in models.items()
        }
    group = group_of(rows, log_probs)
    case = replace(case, train=dict(micro_batch_size=3))
    metrics, gap, grads = pool.run(learn, case.world, tiny(**sizes), case, group)[0]
    model, loss = load_reference(tiny(**sizes)), torch.zeros(())
    tokens, cut, masked = 0, 0, 0
    advantages = group_advantages(group.rewards, RL.advantage)
    for episode, row, advantage in zip(group.episodes, rows, advantages, strict=True):
        drawn_S = row.labels_S != IGNORE
        now_N = row_log_probs(model, row)[drawn_S]
        then_N = torch.tensor([each for each in episode.segments[0].log_probs if each is not None])
        ratio_N = (now_N.detach() - then_N).exp()
        weight_N = torch.where((ratio_N < 0.8) | (ratio_N > 1.25), 0, ratio_N.clip(max=1.1))
        loss = loss - (advantage * weight_N * now_N).sum()
        tokens, cut = tokens + len(now_N), cut + int((ratio_N > 1.1).sum())
        masked += int((weight_N == 0).sum())
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(loss / tokens, list(named.values()))
    worst = apart(grads, dict(zip(named, wanted, strict=True)))
    record_property("worst", worst)
    assert worst < TOLERANCE
    assert gap.weights_cut == cut / tokens and 0.1 < gap.weights_cut < 0.9
    assert gap.masked == masked / tokens and 0.1 < gap.masked < 0.9
    line = rl_line(6, Rollout([group], 1, 0, Position(0), 0.1), metrics, gap)
    spans = [span for each in group.episodes for span in each.versions]
    assert line.behind == sum((5 - version) * count for version, count in spans) / tokens
    assert line.behind_max == 4


AHEAD = 2
KINDS = {
    "letters": {"reward": f"{TASKS}:letters"},
    "looks": {"environment": f"{TASKS}:Looks"},
    "dynamic": {"reward": f"{TASKS}:equal", "dynamic_sampling": True, "max_rounds": 3},
}


class Drawing:
    """Rollouts of an engine whose answers depend on their seeds and on the version of the weights.
    An update comes once all rollouts that were begun are drawn, so nothing depends on time."""

    def __init__(self, source: EpisodeRunner, folder: Path, ahead: int, last_step: int):
        cfg = replace(source.cfg, rl=replace(source.cfg.rl, off_policy_steps=ahead))
        options = {"vocab": 200, "release": "", "asked": str(folder / "asked")}
        settings = EngineSettings(
            stand_in(folder), cfg.model.path, max_len=512, pictures=9, options=options
        )
        self.engines = EngineThread()
        self.engines.start(EngineConfig(name="vllm"), settings, lambda: None)
        commands: Any = SimpleNamespace(result_of=lambda work: work.result())
        runner = replace(source, cfg=cfg)
        self.rollouts = Rollouts(runner, commands, self.engines, last_step)

    def update(self, version: int) -> None:
        weights = Checkpoint(f"/weights/{version}")
        self.engines.submit(self.engines.engine.update(weights, version)).result()

    def take(self, step: int, position: Position) -> Rollout:
        rollout = self.rollouts.take(step, position)
        for each in self.rollouts.begun.values():
            each.rollout.result()
        return rollout

    def close(self) -> None:
        self.rollouts.close()
        self.engines.close()


def stand_in(folder: Path) -> str:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    return str(python)


def facts(rollout: Rollout) -> list[Any]:
    """Return what a step trains on."""
    return [
        (each.where, each.reward, each.versions, each.answers, part.ids, part.log_probs, pixels)
        for group in rollout.groups
        for each in group.episodes
        for part in each.segments
        for pixels in [[row.pixel_values_PC for row in part.pictures if row.has_media]]
    ]


def versions_of(rollout: Rollout) -> set[int]:
    episodes = [each for group in rollout.groups for each in group.episodes]
    return {version for each in episodes for version, _ in each.versions}


@pytest.fixture(params=KINDS)
def source(request, tiny, tmp_path) -> Iterator[EpisodeRunner]:
    write_set(tmp_path, rows=7)
    model = tiny(deepstack=1, from_scratch=True)
    yield from opened(config(tmp_path, model, max_new_tokens=4, **KINDS[request.param]))


def test_a_resumed_run_trains_on_the_same_answers(source, tmp_path):
    """The steps whose answers were drawn before the checkpoint are those of the run that went on,
    and so are all others: tokens, log-probs, versions, rewards and pictures. The engine is asked
    for no answer twice."""
    steps, saved = 5, 2
    drawing = Drawing(source, tmp_path, AHEAD, steps - 1)
    position, taken, positions = Position(), [], []
    for step in range(steps):
        taken.append(drawing.take(step, position))
        position = taken[-1].after
        positions.append(position)
        if step + 1 == saved:
            for name, text in drawing.rollouts.texts().items():
                (tmp_path / name).write_text(text)
        drawing.update(step + 1)
    assert drawing.rollouts.texts() == {}
    drawing.close()
    for step, each in enumerate(taken):
        assert versions_of(each) == {max(step - AHEAD, 0)}
    asked = len((tmp_path / "asked").read_text().splitlines())
    again = Drawing(source, tmp_path, AHEAD, steps - 1)
    again.update(saved)
    again.rollouts.restore(tmp_path)
    position = positions[saved - 1]
    for step in range(saved, steps):
        rollout = again.take(step, position)
        assert same(facts(rollout), facts(taken[step])) and rollout.after == positions[step]
        position = rollout.after
        again.update(step + 1)
    again.close()
    assert len((tmp_path / "asked").read_text().splitlines()) - asked < asked / 2
    # Answers that are too old for a smaller bound are drawn again.
    fewer = Drawing(source, tmp_path, AHEAD - 1, steps - 1)
    fewer.update(saved)
    fewer.rollouts.restore(tmp_path)
    rollout = fewer.take(saved, positions[saved - 1])
    fewer.close()
    assert versions_of(rollout) == {saved}


def learnt_ahead(folder: Path, model: str, run: str, *more: str) -> tuple[int, str, str]:
    """Run steps whose answers are drawn two steps ahead, before the next update."""
    take = Rollouts.take

    def take_all(rollouts: Rollouts, step: int, position: Position) -> Rollout:
        rollout = take(rollouts, step, position)
        for each in rollouts.begun.values():
            each.rollout.result()
        return rollout

    keys = ["engine.name=uniform", "rl.off_policy_steps=2", "rl.mask_weight=[0.08,5]"]
    keys += ["train.steps=5", "data.eval=null", "checkpoint.every=1", "checkpoint.keep_last=9"]
    with registered(folder), patch.object(Rollouts, "take", take_all):
        return run_rank(words(folder, model, run, *keys, *more))


@pytest.mark.full
def test_a_run_that_draws_ahead_resumes_bit_for_bit(pool, tiny, tmp_path):
    write_set(tmp_path, rows=7)
    model = tiny(deepstack=1, from_scratch=True)
    pool.run(learnt_ahead, 1, tmp_path, model, "whole")
    [origin] = (tmp_path / "whole" / "checkpoints").glob("step-*2")
    pool.run(learnt_ahead, 1, tmp_path, model, "resumed", f"checkpoint.resume={origin}")
    expected, found = (lines(tmp_path / run, "rl") for run in ("whole", "resumed"))
    assert [each["behind"] for each in expected] == [0, 1, 2, 2, 2]
    assert all(0 < each["masked"] < 1 for each in expected)
    for one, two in zip(expected[2:], found, strict=True):
        assert {**one, "sampling_s": 0, "wall_s": 0} == {**two, "sampling_s": 0, "wall_s": 0}
    assert furthest(tmp_path / "whole", tmp_path / "resumed") == 0
