"""Rollouts of each step: the choice of prompts, and the sampler that draws the answers."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.distributed.rank0 import HEARTBEAT_S, result_of
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.rl.completion_requests import CompletionQueue, EngineQueue, LockstepQueue
from megatron_vlm.rl.episode import Group
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.rank_commands import RankCommands

T = TypeVar("T")


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


class Rollouts(Protocol):
    """Source of rollouts on rank 0."""

    def take(self, step: int, position: Position) -> Rollout:
        """Return the rollout of a step, whose prompts begin at this position."""

    def run(self, play: Play[T], episode_runner: EpisodeRunner) -> T:
        """Return the result of `play`, whose episodes get their answers from the given queue."""

    def close(self) -> None: ...


async def collect_rollouts(
    episode_runner: EpisodeRunner, queue: CompletionQueue, step: int, position: Position
) -> Rollout:
    """Sample answers to the prompts of a step. With dynamic sampling, prompts whose answers all
    have the same reward are replaced by others, because they give no gradient."""
    start, num_prompts = time.perf_counter(), episode_runner.cfg.train.global_batch_size
    rl = episode_runner.cfg.rl
    with_signal: list[Group] = []
    without_signal: list[Group] = []
    num_tried = 0
    for _ in range(rl.max_rounds if rl.dynamic_sampling else 1):
        handles, position = next_prompts(
            episode_runner.data, position, num_prompts - len(with_signal)
        )
        new_groups = await episode_runner.play(queue, handles, step, num_tried)
        num_tried += len(handles)
        with_signal += [group for group in new_groups if group.has_signal]
        without_signal += [group for group in new_groups if not group.has_signal]
        if len(with_signal) == num_prompts:
            break
    groups = with_signal
    if not rl.dynamic_sampling or not with_signal:
        groups = sorted([*with_signal, *without_signal], key=lambda group: group.episodes[0].group)[
            :num_prompts
        ]
    if not groups:
        place = f"step {step}: the last of {num_tried} prompts, of which none can be read"
        raise episode_runner.skipped[-1].within(place)
    return Rollout(groups, num_tried, len(without_signal), position, time.perf_counter() - start)


def next_prompts(data: DataSet, position: Position, count: int) -> tuple[list[Handle], Position]:
    """Return this number of prompts from a position on, across epochs, and the position after
    them."""
    prompts: list[Handle] = []
    for handle, after in islice(_from(data, position), count):
        prompts.append(handle)
        position = after
    return prompts, position


def _from(data: DataSet, position: Position) -> Iterator[tuple[Handle, Position]]:
    while True:
        for handle, _, after in data.epoch(position):
            yield handle, after
        position = Position(position.epoch + 1)


class OwnRollouts:
    """Rollouts from the trainer's own decoder, drawn on all ranks in lockstep."""

    def __init__(self, episode_runner: EpisodeRunner, commands: RankCommands):
        self.episode_runner, self.commands = episode_runner, commands
        self.runner = asyncio.Runner()

    def take(self, step: int, position: Position) -> Rollout:
        source = self.episode_runner
        return self.run(lambda queue: collect_rollouts(source, queue, step, position), source)

    def run(self, play: Play[T], episode_runner: EpisodeRunner) -> T:
        return self.runner.run(self._run(play, episode_runner.settings))

    async def _run(self, play: Play[T], settings: SamplingSettings) -> T:
        queue = LockstepQueue()
        collecting = asyncio.create_task(play(queue))
        try:
            while not collecting.done():
                if queue.waiting and queue.all_wait.is_set():
                    self._answer(queue, settings)
                waiting = asyncio.create_task(queue.all_wait.wait())
                await asyncio.wait(
                    [collecting, waiting], timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                waiting.cancel()
                self.commands.wait()
        finally:
            collecting.cancel()
        return await collecting

    def _answer(self, queue: LockstepQueue, settings: SamplingSettings) -> None:
        requests = queue.next_prompts_to_answer()
        for request, completions in zip(
            requests, self.commands.draw(requests, settings), strict=True
        ):
            for answer, completion in zip(request.answers, completions, strict=True):
                answer.set_result(completion)

    def close(self) -> None:
        self.runner.close()


class EngineRollouts:
    """Rollouts from engines. With rl.off_policy_steps=1, those of the next step are drawn during
    this step."""

    def __init__(
        self,
        episode_runner: EpisodeRunner,
        commands: RankCommands,
        engines: EngineThread,
        last_step: int,
    ):
        self.episode_runner, self.commands, self.engines = episode_runner, commands, engines
        self.ahead, self.last_step = episode_runner.cfg.rl.off_policy_steps, last_step
        self.begun: Future[Rollout] | None = None

    def take(self, step: int, position: Position) -> Rollout:
        future, self.begun = self.begun or self._begin(step, position), None
        rollout: Rollout = result_of(future, self.commands.wait)
        if self.ahead and step < self.last_step:
            self.begun = self._begin(step + 1, rollout.after)
        return rollout

    def run(self, play: Play[T], episode_runner: EpisodeRunner) -> T:
        queue = EngineQueue(self.engines.engine, episode_runner.settings)
        result: T = result_of(self.engines.submit(play(queue)), self.commands.wait)
        return result

    def _begin(self, step: int, position: Position) -> "Future[Rollout]":
        queue = EngineQueue(self.engines.engine, self.episode_runner.settings)
        return self.engines.submit(collect_rollouts(self.episode_runner, queue, step, position))

    def close(self) -> None:
        if self.begun is not None:
            self.begun.cancel()
