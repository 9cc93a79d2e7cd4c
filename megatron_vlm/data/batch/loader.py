"""From sources to the micro-batches of each step, decoded ahead of it by worker processes.

One process of a replica loads (`share.py` hands its micro-batches to the others). What comes next
is decided from sizes alone, the same on every replica: the loaders need no word with each other,
and to resume means to go on counting. Nothing that was consumed is decoded again.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batch.batching import Limits, Plan, RowSize, plan_batch
from megatron_vlm.data.batch.micro_batch import MicroBatch, collate, filler_batch
from megatron_vlm.data.batch.position import Data, Position
from megatron_vlm.data.encode.index import check_errors
from megatron_vlm.data.processes import in_processes
from megatron_vlm.errors import DataError

log = logging.getLogger("megatron_vlm.data")


@dataclass(frozen=True)
class Replica:
    """Which data parallel replica loads, of how many."""

    rank: int = 0
    count: int = 1


@dataclass(frozen=True)
class BatchFigures:
    """Of a whole global batch, the same on every replica."""

    samples: int
    tokens: int
    padded: int  # tokens with the padding of all micro-batches
    images: int
    work: float  # operations of its forward

    @staticmethod
    def of(sizes: list[RowSize], plan: Plan) -> "BatchFigures":
        padded = sum(
            len(group) * max(sizes[row].tokens for row in group)
            for share in plan
            for group in share
        )
        return BatchFigures(
            len(sizes),
            sum(size.tokens for size in sizes),
            padded,
            sum(size.images for size in sizes),
            sum(size.cost for size in sizes),
        )


@dataclass(frozen=True)
class StepBatch:
    """One replica's part of a global batch."""

    micro_batches: list[MicroBatch]
    after: Position  # where the next step goes on
    figures: BatchFigures
    skipped: tuple[str, ...] = ()  # errors of samples left out, of this replica


@dataclass(frozen=True)
class _Task:
    """What a worker process makes: one micro-batch."""

    handles: tuple[Any, ...]
    places: tuple[int, ...]  # of its rows in the replica's part
    last: bool  # of its step
    after: Position
    figures: BatchFigures


class _Tasks:
    """The tasks of a replica, epoch after epoch: a DataLoader's sampler."""

    def __init__(
        self,
        data: Data,
        batch_size: int,
        limits: Limits,
        replica: Replica,
        start: Position,
        epochs: float,
    ):
        self.data, self.batch_size, self.limits = data, batch_size, limits
        self.replica, self.start, self.epochs = replica, start, epochs

    def __iter__(self) -> Iterator[_Task]:
        position = self.start
        while position.epoch < self.epochs:
            batch: list[tuple[Any, RowSize]] = []
            for handle, size, after in self.data.epoch(position):
                batch.append((handle, size))
                if len(batch) == self.batch_size:
                    yield from self._step(batch, after)
                    batch = []
            position = Position(position.epoch + 1)
            if batch:  # the last one of an epoch is as large as it is: no row comes twice
                yield from self._step(batch, position)

    def _step(self, batch: list[tuple[Any, RowSize]], after: Position) -> Iterator[_Task]:
        sizes = [size for _, size in batch]
        plan = plan_batch(sizes, self.replica.count, self.limits)
        figures, mine = BatchFigures.of(sizes, plan), plan[self.replica.rank]
        for number, group in enumerate(mine or [[]]):
            handles = tuple(batch[row][0] for row in group)
            last = number + 1 >= len(mine)
            yield _Task(handles, tuple(group), last, after, figures)


class _Decoded:
    """Tasks carried out, for worker processes."""

    def __init__(self, data: Data, cfg: DataConfig):
        self.data, self.cfg = data, cfg

    def __getitem__(self, task: _Task) -> tuple[_Task, MicroBatch | DataError, tuple[str, ...]]:
        rows, places, errors = [], [], []
        for handle, place in zip(task.handles, task.places, strict=True):
            try:
                rows.append(self.data.row(handle))
                places.append(place)
            except DataError as error:
                if self.cfg.on_error == "raise":
                    return task, error, ()  # raised here, a DataLoader would wrap its message
                errors.append(str(error))
        return task, collate(rows, places) if rows else filler_batch(), tuple(errors)


@dataclass
class Loader:
    """The steps of a replica from a position on; `epochs` may be infinite."""

    data: Data
    cfg: DataConfig
    batch_size: int  # of the global batch
    limits: Limits
    replica: Replica = Replica()
    start: Position = field(default_factory=Position)
    epochs: float = float("inf")
    errors: list[str] = field(default_factory=list)  # of samples that could not be decoded

    def __iter__(self) -> Iterator[StepBatch]:
        tasks = _Tasks(
            self.data, self.batch_size, self.limits, self.replica, self.start, self.epochs
        )
        decoded = _Decoded(self.data, self.cfg)
        loaded = in_processes(decoded, tasks, self.cfg.num_workers, self.cfg.prefetch)
        micro_batches: list[MicroBatch] = []
        skipped: tuple[str, ...] = ()
        for task, outcome, errors in loaded:
            if isinstance(outcome, DataError):
                raise outcome
            self.errors += errors
            for error in errors:
                log.warning("skipped %s", error)
            check_errors([*self.data.faults()[1], *self.errors], self.cfg)
            micro_batches.append(outcome)
            skipped += errors
            if task.last:
                yield StepBatch(micro_batches, task.after, task.figures, skipped)
                micro_batches, skipped = [], ()
