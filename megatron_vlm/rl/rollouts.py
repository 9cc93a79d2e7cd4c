"""The samples of each step: which prompts are asked, how often, and who draws the answers."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.distributed.rank0 import EVERY_S, result_of
from megatron_vlm.engines.engine_thread import Engines
from megatron_vlm.rl.completion_requests import CompletionQueue, EngineQueue, LockstepQueue
from megatron_vlm.rl.episode import Group
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.rank_commands import RankCommands


@dataclass(frozen=True)
class Rollout:
    """What a step learns from, and where the next one's prompts begin."""

    groups: list[Group]
    asked: int  # prompts
    alike: int  # of these, those whose answers all got the same reward
    after: Position
    seconds: float


class Rollouts(Protocol):
    """On rank 0."""

    def take(self, step: int, position: Position) -> Rollout:
        """The samples of a step, whose prompts begin at this position."""

    def close(self) -> None: ...


async def collect_rollouts(
    table: EpisodeRunner, desk: CompletionQueue, step: int, position: Position
) -> Rollout:
    """Ask as many prompts as a step has. With dynamic sampling, those whose answers all got the
    same reward, from which nothing is learnt, are replaced by others."""
    start, wanted = time.perf_counter(), table.cfg.train.global_batch_size
    rl = table.cfg.rl
    kept: list[Group] = []
    alike: list[Group] = []
    asked = 0
    for _ in range(rl.max_rounds if rl.dynamic_sampling else 1):
        handles, position = next_prompts(table.data, position, wanted - len(kept))
        found = await table.play(desk, handles, step, asked)
        asked += len(handles)
        kept += [group for group in found if group.has_signal]
        alike += [group for group in found if not group.has_signal]
        if len(kept) == wanted:
            break
    groups = kept
    if not rl.dynamic_sampling or not kept:
        groups = sorted([*kept, *alike], key=lambda group: group.episodes[0].group)[:wanted]
    if not groups:
        place = f"step {step}: the last of {asked} prompts, of which none can be read"
        raise table.skipped[-1].within(place)
    return Rollout(groups, asked, len(alike), position, time.perf_counter() - start)


def next_prompts(data: DataSet, position: Position, count: int) -> tuple[list[Handle], Position]:
    """So many prompts from a position on, over the ends of epochs, and the position after them."""
    found: list[Handle] = []
    for handle, after in islice(_from(data, position), count):
        found.append(handle)
        position = after
    return found, position


def _from(data: DataSet, position: Position) -> Iterator[tuple[Handle, Position]]:
    while True:
        for handle, _, after in data.epoch(position):
            yield handle, after
        position = Position(position.epoch + 1)


class OwnRollouts:
    """Drawn by the trainer's own decoder, on all ranks, round by round."""

    def __init__(self, table: EpisodeRunner, orders: RankCommands):
        self.table, self.orders = table, orders
        self.runner = asyncio.Runner()

    def take(self, step: int, position: Position) -> Rollout:
        return self.runner.run(self._take(step, position))

    async def _take(self, step: int, position: Position) -> Rollout:
        desk = LockstepQueue()
        playing = asyncio.create_task(collect_rollouts(self.table, desk, step, position))
        try:
            while not playing.done():
                if desk.waiting and desk.all_wait.is_set():
                    self._answer(desk)
                waiting = asyncio.create_task(desk.all_wait.wait())
                await asyncio.wait(
                    [playing, waiting], timeout=EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                waiting.cancel()
                self.orders.wait()
        finally:
            playing.cancel()
        return await playing

    def _answer(self, desk: LockstepQueue) -> None:
        asked = desk.taken()
        for each, found in zip(asked, self.orders.draw(asked, self.table.settings), strict=True):
            for answer, completion in zip(each.answers, found, strict=True):
                answer.set_result(completion)

    def close(self) -> None:
        self.runner.close()


class EngineRollouts:
    """Drawn by engines; with rl.off_policy_steps=1 those of the next step during this one."""

    def __init__(
        self, table: EpisodeRunner, orders: RankCommands, engines: Engines, last_step: int
    ):
        self.table, self.orders, self.engines = table, orders, engines
        self.ahead, self.last_step = table.cfg.rl.off_policy_steps, last_step
        self.begun: Future[Rollout] | None = None

    def take(self, step: int, position: Position) -> Rollout:
        begun, self.begun = self.begun or self._begin(step, position), None
        found: Rollout = result_of(begun, self.orders.wait)
        if self.ahead and step < self.last_step:
            self.begun = self._begin(step + 1, found.after)
        return found

    def _begin(self, step: int, position: Position) -> "Future[Rollout]":
        desk = EngineQueue(self.engines.sampler, self.table.settings)
        return self.engines.submit(collect_rollouts(self.table, desk, step, position))

    def close(self) -> None:
        if self.begun is not None:
            self.begun.cancel()
