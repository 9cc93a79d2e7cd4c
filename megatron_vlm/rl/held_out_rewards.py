"""Rewards of held-out prompts: data.eval is answered, and the rewards are averaged."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from megatron_vlm.config.command_checks import needs_held_out_rewards
from megatron_vlm.config.data_sources import EvalSource
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.rollouts import Rollouts
from megatron_vlm.run.evaluation.held_out_sets import first_samples
from megatron_vlm.run.run import Run
from megatron_vlm.training.data_feed import open_together
from megatron_vlm.user_code.pool import NoRewards, RewardPool

_NUMBERS = 2**40  # episodes of each runner, whose numbers must differ in the pool


@dataclass(frozen=True)
class HeldOutPrompts:
    """The prompts of each held-out set, on rank 0."""

    runners: Mapping[str, EpisodeRunner]

    @staticmethod
    def open(run: Run) -> dict[str, DataSet]:
        """Open the sets of data.eval as prompts, and return this rank's sets. A collective."""
        if not needs_held_out_rewards(run.cfg):
            return {}
        sets = {each.name: _open(run, each) for each in run.cfg.data.eval}
        return {name: data for name, data in sets.items() if data is not None}

    @staticmethod
    def with_pool(
        cfg: Config, sets: Mapping[str, DataSet], pool: RewardPool | NoRewards
    ) -> "HeldOutPrompts":
        """Return the prompts with the rewards that judge their answers."""
        # An answer is compared with no other here.
        rl = replace(cfg.rl, samples=1, temperature=cfg.rl.eval_temperature)
        return HeldOutPrompts(
            {
                name: EpisodeRunner(replace(cfg, rl=rl), data, pool, begun=place * _NUMBERS)
                for place, (name, data) in enumerate(sets.items(), start=1)
            }
        )

    def rewards(self, rollouts: Rollouts) -> dict[str, dict[str, float]]:
        """Answer every prompt once, and return the scores of each set."""
        scores = {}
        for name, runner in self.runners.items():
            start = time.perf_counter()
            values = rollouts.run(partial(_play_all, runner), runner)
            seconds = time.perf_counter() - start
            scores[name] = {"reward": fmean(values), "samples": len(values), "seconds": seconds}
        return scores


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
