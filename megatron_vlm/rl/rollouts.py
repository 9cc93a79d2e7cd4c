"""Rollouts of each step: the choice of prompts, and the engine that draws the answers."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.errors import DataError
from megatron_vlm.rl.completion_requests import CompletionQueue, Drawn
from megatron_vlm.rl.episode import Group
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.rank_commands import RankCommands

T = TypeVar("T")
ROLLOUTS = "rollouts.json"  # file of a checkpoint


@dataclass(frozen=True)
class Rollout:
    """Samples of a step, and the position of the next step's prompts."""

    groups: list[Group]
    num_prompts: int
    alike: int  # number of these prompts whose answers all have the same reward
    after: Position
    seconds: float


# A coroutine function that plays episodes, whose answers come from the queue.
Play = Callable[[CompletionQueue], Coroutine[Any, Any, T]]


async def collect_rollouts(
    episode_runner: EpisodeRunner,
    queue: CompletionQueue,
    step: int,
    position: Position,
    tell_next: Callable[[Position], None] = lambda position: None,
) -> Rollout:
    """Sample answers to the prompts of a step. With dynamic sampling, prompts whose answers all
    have the same reward are replaced by others, because they give no gradient. `tell_next` is
    called with the position of the next step's prompts as soon as it is known."""
    start, num_prompts = time.perf_counter(), episode_runner.cfg.train.global_batch_size
    rl = episode_runner.cfg.rl
    with_signal: list[Group] = []
    without_signal: list[Group] = []
    num_tried = 0
    for _ in range(rl.max_rounds if rl.dynamic_sampling else 1):
        handles, position = next_prompts(
            episode_runner.data, position, num_prompts - len(with_signal)
        )
        if not rl.dynamic_sampling:
            tell_next(position)
        new_groups = await episode_runner.play(queue, handles, step, num_tried)
        num_tried += len(handles)
        with_signal += [group for group in new_groups if group.has_signal]
        without_signal += [group for group in new_groups if not group.has_signal]
        if len(with_signal) == num_prompts:
            break
    if rl.dynamic_sampling:
        tell_next(position)
    groups = with_signal
    if not rl.dynamic_sampling or not with_signal:
        groups = sorted([*with_signal, *without_signal], key=lambda group: group.episodes[0].group)[
            :num_prompts
        ]
    if not groups:
        place = f"step {step}: the last of {num_tried} prompts, of which none can be read"
        raise episode_runner.skipped[-1].within(place)
    if not any(episode.trained for group in groups for episode in group.episodes):
        raise DataError(
            f"has failed in all episodes of step {step} before it has asked for an answer",
            place=groups[0].episodes[0].where,
            key="rl.environment" if rl.has_harness else "rl.agent",
            found=rl.environment or rl.agent,
            remedy="mend it; what it has printed is above",
        )
    return Rollout(groups, num_tried, len(without_signal), position, time.perf_counter() - start)


def next_prompts(data: DataSet, position: Position, count: int) -> tuple[list[Handle], Position]:
    """Return this number of prompts from a position on, across epochs, and the position after
    them."""
    prompts: list[Handle] = []
    while True:
        for handle, _, after in islice(data.epoch(position), count - len(prompts)):
            prompts.append(handle)
            position = after
        if len(prompts) == count:
            return prompts, position
        position = Position(position.epoch + 1)


@dataclass(frozen=True)
class BegunRollout:
    """A rollout in progress, or finished. `after` is the position of the next step's prompts."""

    rollout: "Future[Rollout]"
    after: "Future[Position]"
    drawn: Drawn  # answers so far


class Rollouts:
    """Source of rollouts on rank 0. During a step, an engine draws the rollouts of the next
    rl.off_policy_steps steps: no token of a step comes from weights older than that."""

    def __init__(
        self,
        episode_runner: EpisodeRunner,
        commands: RankCommands,
        engines: EngineThread,
        last_step: int,
    ):
        self.episode_runner, self.commands, self.engines = episode_runner, commands, engines
        self.in_rounds = engines.engine.capacity.in_rounds
        self.ahead, self.last_step = episode_runner.cfg.rl.off_policy_steps, last_step
        self.begun: dict[int, BegunRollout] = {}  # by step
        self.known: dict[int, Drawn] = {}  # answers of an earlier run by step

    def take(self, step: int, position: Position) -> Rollout:
        """Return the rollout of a step, whose prompts begin at this position."""
        after: Future[Position] = Future()
        after.set_result(position)
        for each in range(step, min(step + self.ahead, self.last_step) + 1):
            if each not in self.begun:
                self.begun[each] = self._begin(each, after)
            after = self.begun[each].after
        rollout = self.commands.result_of(self.begun[step].rollout)
        del self.begun[step]
        return rollout

    def run(self, play: Play[T], episode_runner: EpisodeRunner) -> T:
        """Return the result of `play`, whose episodes get their answers from the given queue."""
        return self.commands.result_of(self.engines.submit(play(self._queue(episode_runner, {}))))

    def _queue(self, source: EpisodeRunner, drawn: Drawn) -> CompletionQueue:
        return CompletionQueue(self.engines.engine, source.settings, self.in_rounds, drawn)

    def _begin(self, step: int, before: "Future[Position]") -> BegunRollout:
        after: Future[Position] = Future()
        drawn, source = self.known.pop(step, {}), self.episode_runner
        queue = self._queue(source, drawn)

        async def collect() -> Rollout:
            position = await asyncio.wrap_future(before)
            return await collect_rollouts(source, queue, step, position, after.set_result)

        return BegunRollout(self.engines.submit(collect()), after, drawn)

    def texts(self) -> dict[str, str]:
        """Return the file of a checkpoint with the answers that no step has trained on yet. After a
        resume, these are not drawn again. Answers with the routing of their tokens are not kept."""
        steps = {
            step: [
                [*key, each.as_json()]
                for key, each in begun.drawn.copy().items()
                if each.routing_SLK is None
            ]
            for step, begun in self.begun.items()
        }
        return {ROLLOUTS: json.dumps(steps)} if steps else {}

    def restore(self, checkpoint: Path | None) -> None:
        """Take the answers of a checkpoint, unless some token is older than rl.off_policy_steps
        allows. Answers of another engine do not have the log-probs of the ranks."""
        if self.in_rounds or checkpoint is None or not (file := checkpoint / ROLLOUTS).is_file():
            return
        for name, answers in json.loads(file.read_text()).items():
            drawn = {(seed, at): Completion.from_json(values) for seed, at, values in answers}
            self.known[int(name)] = {
                key: each
                for key, each in drawn.items()
                if int(name) - each.versions[0][0] <= self.ahead
            }

    def close(self) -> None:
        for each in self.begun.values():
            each.rollout.cancel()
