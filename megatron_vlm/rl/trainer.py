"""Trainer for reinforcement learning: its state on a rank, in addition to the run's."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_vlm.config.command_checks import needs_held_out_rewards
from megatron_vlm.config.data_sources import EvalSource
from megatron_vlm.config.evaluation_checks import has_agents, has_rewards, reward_model_of
from megatron_vlm.config.teachers import needs_initial_model
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.batches.loader import BatchFigures, StepBatch
from megatron_vlm.data.batches.order import Position
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.report.metrics_lines import has_usage_line
from megatron_vlm.rl.agent_server import AgentServer
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.policy_engine import settings_of, sync_engine_weights
from megatron_vlm.rl.policy_update import LogProbGap, PolicyUpdater, join_metrics
from megatron_vlm.rl.rank_commands import RankCommands
from megatron_vlm.rl.reward_model import ModelRewards
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.rl.rollouts import Rollout, Rollouts
from megatron_vlm.rl.seen import SeenScores
from megatron_vlm.rl.step_report import SightWatch, SignalWatch, rl_line, write_sample_lines
from megatron_vlm.rl.teacher_engines import EngineTeachers, check_teachers
from megatron_vlm.rl.train_batch import (
    TrainBatch,
    groups_of_updates,
    make_train_batch,
    train_batch_from_bytes,
    train_batch_to_bytes,
)
from megatron_vlm.run.evaluation.held_out_sets import first_samples
from megatron_vlm.run.run import Run
from megatron_vlm.training.data_feed import open_together
from megatron_vlm.training.worker import StepMetrics
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

_NUMBERS = 2**40  # episodes of each runner, whose numbers must differ in the pool


def _held_out(run: Run) -> dict[str, DataSet]:
    """Open the sets of data.eval as prompts, and return this rank's sets. A collective."""
    if not needs_held_out_rewards(run.cfg):
        return {}
    sets = {each.name: _open(run, each) for each in run.cfg.data.eval}
    return {name: data for name, data in sets.items() if data is not None}


def _open(run: Run, entry: EvalSource) -> DataSet | None:
    cfg, grid = run.cfg, run.worker.grid
    name = f"the prompts of data.eval {entry.name}"

    def opening() -> tuple[DataSet, None]:
        share, sizes = (grid.dp.rank, grid.dp.size), run.worker.source.sizes
        path, specs = cfg.model.path, (entry.source,)
        data = open_data(
            specs, "data.eval", cfg.data, path, sizes, share, train=False, kind="prompt"
        )
        assert isinstance(data, DataSet), "config/checks.py refuses streams"
        return first_samples(data, cfg.eval.samples), None

    return open_together(name, grid, opening, run.watchdog)[0]


async def _play_all(runner: EpisodeRunner, queue: CompletionQueue) -> list[float]:
    """Return the reward of every prompt, in the order of the set. As many episodes run at a time as
    in a step, since their pictures are in memory."""
    cfg, data = runner.cfg, runner.data
    handles = [(int(source), int(sample)) for source, sample in data.order.epoch(0)]
    size = cfg.train.global_batch_size
    rewards: list[float] = []
    for first in range(0, len(handles), size):
        # The same seeds in every evaluation, so that two of them differ by their weights alone.
        groups = await runner.play(queue, handles[first : first + size], 0, first)
        rewards += [reward for group in groups for reward in group.rewards]
    if not rewards:
        raise runner.skipped[-1].within("data.eval, of which no prompt can be read")
    return rewards


class RlTrainer:
    """Trainer, opened by `with RlTrainer.open(run) as trainer`. Rank 0 runs the episodes and the
    sampler that draws their answers. The other ranks run the commands of rank 0."""

    def __init__(self, run: Run, opened: ExitStack):
        """`opened` closes the rewards and engines that are started."""
        self.run, self.opened = run, opened
        self.cfg, self.leads = run.cfg, run.worker.grid.rank == 0
        self.updater = PolicyUpdater(run.worker)
        with fail_together(ConfigError):
            if self.leads:
                check_teachers(self.cfg)
        if needs_initial_model(self.cfg):
            run.begin_phase(run.progress.step, "loading the initial model", files=True)
            with self.updater.models.reference():
                pass  # it is loaded now, and not in the first step
        if self.cfg.teacher.path is not None and self.updater.teaches_on_ranks:
            run.begin_phase(run.progress.step, "loading the teachers", files=True)
            assert list(self.updater.teachers())
        self.commands = RankCommands(run.worker, run.signals)
        if (folder := reward_model_of(self.cfg.rl)) is not None:
            run.begin_phase(run.progress.step, "loading the reward model", files=True)
            self.commands.reward_model = self.updater.models.reward_model(folder)
        self.engines: EngineThread | None = None  # set on rank 0
        self.rollouts: Rollouts | None = None
        self.teachers: EngineTeachers | None = None  # set on rank 0, if there are such engines
        self.last: Rollout | None = None  # set on rank 0 only
        self.signal, self.sight = SignalWatch(self.cfg.rl), SightWatch()
        held_out = _held_out(run)
        run.begin_phase(run.progress.step, "starting rewards and engines", files=True)
        with fail_together(ConfigError):
            if self.leads:
                self._start_reward_pool(held_out)
        if needs_held_out_rewards(self.cfg):
            run.rate_held_out = self.held_out_rewards
        self._lead(self._start)
        if run.progress.step or self.cfg.lora.rank:
            self.renew(run.progress.step)

    @staticmethod
    @contextmanager
    def open(run: Run) -> Iterator["RlTrainer"]:
        """Yield a trainer, and close it afterwards, also after an error."""
        with ExitStack() as opened:
            yield RlTrainer(run, opened)

    def _start_reward_pool(self, held_out: Mapping[str, DataSet]) -> None:
        rl, data = self.cfg.rl, self.run.feeder.data
        assert isinstance(data, DataSet), "config/command_checks.py refuses streams"
        pool = RewardPool(RewardSettings.from_config(rl, rl.processes))
        self.opened.callback(pool.close)
        views = None
        if self.cfg.teacher.view is not None:
            views = RewardPool(RewardSettings.of_view(self.cfg, rl.processes))
            self.opened.callback(views.close)
        self.episode_runner = EpisodeRunner(self.cfg, data, pool, views)
        # An answer is compared with no other there.
        alone = replace(self.cfg, rl=replace(rl, samples=1, temperature=rl.eval_temperature))
        self.held_out = {
            name: EpisodeRunner(alone, each, pool, begun=place * _NUMBERS)
            for place, (name, each) in enumerate(held_out.items(), start=1)
        }
        if (folder := reward_model_of(rl)) is not None:
            rewards = ModelRewards(self.cfg, folder, self.commands.score_soon)
            for runner in (self.episode_runner, *self.held_out.values()):
                runner.reward_model = rewards

    def _start(self) -> tuple[bytes, dict[str, Any]]:
        """Start the sampler on rank 0."""
        data, waiting, last = self.episode_runner.data, self.commands.wait, self.run.total_steps - 1
        self.engines = EngineThread()
        self.opened.callback(self.engines.close)
        settings = replace(settings_of(self.run.worker, data), draw=self.commands.draw_soon)
        self.engines.start(self.cfg.engine, settings, waiting)
        if has_agents(self.cfg.rl):
            sizes = self.run.worker.source.sizes
            agents = AgentServer(self.cfg, sizes, settings.pictures, self.engines.loop)
            self.opened.callback(agents.close)
            for runner in (self.episode_runner, *self.held_out.values()):
                runner.agents = agents
        self.rollouts = Rollouts(self.episode_runner, self.commands, self.engines, last)
        self.rollouts.restore(self.run.saver.newest)
        self.run.saver.more_texts = self.rollouts.texts
        self.opened.callback(self.rollouts.close)
        if not self.updater.teaches_on_ranks:
            self.teachers = EngineTeachers.start(self.run.worker, data, self.opened, waiting)
        return b"", {}

    def train_batch(self, step: int) -> tuple[TrainBatch, Position]:
        """Return the train batch of a step, and the position of the next step's prompts. This is a
        collective."""

        def sampled() -> tuple[bytes, dict[str, Any]]:
            assert self.rollouts is not None
            self.last = self.rollouts.take(step, self.run.progress.position)
            replicas = self.run.worker.grid.dp.size
            batch = make_train_batch(
                self.last.groups, self.cfg, self.episode_runner.data.work, replicas
            )
            if self.teachers is not None:
                batch = self.teachers.score(batch)
            return train_batch_to_bytes(batch), {"after": asdict(self.last.after)}

        content, facts = self._lead(sampled)
        return train_batch_from_bytes(content), Position(**facts["after"])

    def held_out_rewards(self) -> dict[str, dict[str, float]]:
        """Return the scores of the held-out sets under the current weights. This is a
        collective."""

        def rated() -> tuple[bytes, dict[str, Any]]:
            assert self.rollouts is not None
            scores = {}
            for name, runner in self.held_out.items():
                start = time.perf_counter()
                values = self.rollouts.run(partial(_play_all, runner), runner)
                seconds = time.perf_counter() - start
                scores[name] = {"reward": fmean(values), "samples": len(values), "seconds": seconds}
            return b"", scores

        scores: dict[str, dict[str, float]] = self._lead(rated)[1]
        return scores

    def _lead(self, work: Callable[[], tuple[bytes, dict[str, Any]]]) -> tuple[bytes, Any]:
        """Run `work` on rank 0, and return its result on every rank. An error on rank 0 is raised
        on all ranks."""
        if not self.leads:
            return self.commands.follow()
        try:
            content, facts = work()
        except MegatronVLMError as error:
            self.commands.fail(error)
            raise
        self.commands.end_wait(content, facts)
        return content, facts

    def renew(self, step: int) -> None:
        """Send the current weights to the engines that need them. This is a collective."""
        is_needed = step < self.run.total_steps or needs_held_out_rewards(self.cfg)
        if is_needed and not self.updater.draws_on_ranks:
            self.run.begin_phase(step, "weights of the engines")
            folder = Path(self.cfg.run) / "engine"
            sync_engine_weights(self.run.worker, self.engines, step, folder)

    def record(
        self,
        step: int,
        train_batch: TrainBatch,
        after: Position,
        metrics: Sequence[StepMetrics],
        applied: tuple[float, float],
        apart: LogProbGap | None,
        teacher_kls: Mapping[int, float],
        seen: SeenScores | None,
    ) -> None:
        """Log the data and the metrics of a finished step. `applied`: gradient norm and learning
        rate. `teacher_kls`: the mean KL to the teacher of each row of the train batch. `seen`: how
        far the answers depend on pictures, if that was measured."""
        figures = [astuple(update.figures) for update in train_batch.updates]
        total = BatchFigures(*(sum(column) for column in zip(*figures, strict=True)))
        whole = join_metrics(metrics)
        if self.leads:
            assert self.last is not None
            updates = groups_of_updates(self.last.groups, self.cfg.rl.updates)
            episodes = [each for groups in updates for group in groups for each in group.episodes]
            segments = [(each, part) for each in episodes for part in each.segments]
            for number, kl in teacher_kls.items():
                episode, part = segments[number]
                share = kl * (part.drawn / episode.trained)
                episode.teacher_kl = (episode.teacher_kl or 0.0) + share
            line = rl_line(step + 1, self.last, whole, apart, has_rewards(self.cfg), seen)
            self.run.log.samples(line)
        self.run.record(step, StepBatch([], after, total), whole, *applied)
        if self.leads:
            assert self.last is not None
            first = self.last.groups[0].episodes[0]
            reader = self.episode_runner.data.readers[0]
            right = right_answer(first.record, first.where, reader)
            teaches = self.cfg.teacher.path is not None
            if not teaches and (hint := self.signal.check(self.last.groups, right)) is not None:
                self.run.log.event(step + 1, hint)
            if seen is not None and (hint := self.sight.check(seen)) is not None:
                self.run.log.event(step + 1, hint)
            if has_usage_line(step + 1, self.run.total_steps):
                samples = write_sample_lines(
                    Path(self.cfg.run), step + 1, self.last.groups, self.episode_runner
                )
                self.run.log.show(step + 1, "rl", samples)
