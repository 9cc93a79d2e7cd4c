"""Loader: the micro-batches of each step, which worker processes decode in advance. One process of
a replica loads, and `training/data_feed.py` sends its micro-batches to the others. Sizes alone
decide which rows come next, so loaders need not communicate, and a resumed run only goes on
counting."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import IterableDataset

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches import balance
from megatron_vlm.data.batches.collate import (
    collate,
    collate_examples,
    filler_batch,
    mismatched_rows,
)
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.batches.order import Position, SampleSource
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import escape_controls

log = logging.getLogger("megatron_vlm.data")

# Planning takes about 20 us a row for any number of replicas, and every replica plans the whole
# global batch. From this size on, a process of its own plans, because a step should not wait for
# it.
PLANNED_APART = 256  # rows
_TASKS_AHEAD = 64


@dataclass(frozen=True)
class Replica:
    """The data parallel replica that loads: its rank among `count` replicas."""

    rank: int = 0
    count: int = 1


@dataclass(frozen=True)
class BatchFigures:
    """The figures of a whole global batch, the same on every replica."""

    samples: int
    tokens: int
    padded: int  # tokens plus the padding of all micro-batches
    images: int
    work: float  # operations of its forward
    patches: int = 0  # patches of all rows
    shared_patches: int = 0  # patches that an earlier row of the same micro-batch has, too

    @staticmethod
    def from_plan(sizes: list[balance.RowSize], plan: balance.Plan) -> "BatchFigures":
        groups = ([sizes[row] for row in group] for share in plan for group in share)
        repeated = [each for group in groups for each in balance.repeated_visuals(group)]
        return BatchFigures(
            samples=len(sizes),
            tokens=sum(size.tokens for size in sizes),
            padded=balance.padded_tokens(plan, sizes),
            images=sum(size.images for size in sizes),
            work=sum(size.cost for size in sizes) - sum(each.cost for each in repeated),
            patches=sum(size.patches for size in sizes),
            shared_patches=sum(each.patches for each in repeated),
        )


@dataclass(frozen=True)
class StepBatch:
    """A replica's share of a global batch."""

    micro_batches: list[MicroBatch]
    after: Position  # position at which the next step starts
    figures: BatchFigures
    skipped: tuple[str, ...] = ()  # errors of samples that this replica left out
    # The same prompts with the answers to other prompts of the global batch, on request.
    mismatched: list[MicroBatch] = field(default_factory=list)


@dataclass(frozen=True)
class _Task:
    """A micro-batch that a worker process is to make."""

    handles: tuple[Any, ...]
    places: tuple[int, ...]  # places of its samples in the global batch
    partners: tuple[Any, ...]  # samples whose answers follow the prompts of these, or none
    last: bool  # true for the last micro-batch of a step
    after: Position
    figures: BatchFigures


# A micro-batch and, on request, the same prompts with other answers.
_Outcome = tuple[MicroBatch, MicroBatch | None]


@dataclass(frozen=True)
class _Decoded:
    """The results of tasks, made in worker processes."""

    data: SampleSource
    cfg: DataConfig

    def __getitem__(self, task: _Task) -> tuple[_Task, _Outcome | DataError, tuple[str, ...]]:
        examples, errors = dict[int, list[Row]](), list[str]()
        for handle, place in zip(task.handles, task.places, strict=True):
            try:
                examples[place] = self.data.rows(handle)
            except DataError as error:
                if not self.cfg.max_errors:
                    return task, error, ()  # a DataLoader would wrap a raised error's message
                errors.append(str(error))
        if not examples:
            return task, (filler_batch(), filler_batch()), tuple(errors)
        if self.data.reader.kind in ("chat", "prompt"):
            rows = [row for [row] in examples.values()]
            batch = self._planned(collate(rows, list(examples)))
            return task, (batch, None), tuple(errors)
        return task, self._rated(task, examples), tuple(errors)

    def _rated(self, task: _Task, examples: Mapping[int, list[Row]]) -> _Outcome:
        """Return the micro-batches of rated answers."""
        handles = dict(zip(task.places, task.handles, strict=True))
        rejected = {
            place: [row.is_rejected for row in self.data.example(handles[place])]
            for place in examples
        }
        known = {place: self.data.reference(handles[place]) for place in examples}
        reference = {place: values for place, values in known.items() if values is not None}
        batch = self._planned(collate_examples(examples, rejected, reference or None))
        if not task.partners:
            return batch, None
        partners = dict(zip(task.places, task.partners, strict=True))
        tokens = self.data.reader.tokens
        others = {
            place: mismatched_rows(rows, self.data.example(partners[place]), tokens)
            for place, rows in examples.items()
        }
        return batch, self._planned(collate_examples(others, rejected))

    def _planned(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with what the tower reads of each patch, so that no step computes it."""
        if not len(grid_I3 := batch.grid_I3):
            return batch
        return replace(batch, patch_inputs=self.data.reader.patch_inputs(grid_I3))


@dataclass
class _Planned(IterableDataset[_Task]):
    """The tasks of a loader, planned in a separate process."""

    loader: "Loader"

    def __iter__(self) -> Iterator[_Task]:
        return self.loader.tasks()


@dataclass
class Loader:
    """The steps of a replica, starting at a position; `epochs` may be infinite."""

    data: SampleSource
    cfg: DataConfig
    batch_size: int  # samples of the global batch
    limits: balance.Limits
    replica: Replica = Replica()
    start: Position = field(default_factory=Position)
    epochs: float = float("inf")
    with_mismatched: bool = False  # whether batches have prompts with answers to other prompts
    errors: list[str] = field(default_factory=list)  # errors of samples that could not be decoded

    def __iter__(self) -> Iterator[StepBatch]:
        decoded, cfg = _Decoded(self.data, self.cfg), self.cfg
        micro_batches: list[MicroBatch] = []
        mismatched: list[MicroBatch] = []
        skipped: tuple[str, ...] = ()
        tasks = self.tasks()
        if cfg.num_workers and self.batch_size >= PLANNED_APART and self.data.known_ahead:
            tasks = map_in_processes(_Planned(self), None, 1, _TASKS_AHEAD)
        for task, outcome, errors in map_in_processes(
            decoded, tasks, cfg.num_workers, cfg.prefetch
        ):
            if isinstance(outcome, DataError):
                raise outcome
            self.errors += errors
            for error in errors:
                log.warning("skipped %s", escape_controls(error))
            check_errors([*self.data.faults()[1], *self.errors], cfg)
            batch, others = outcome
            micro_batches.append(batch)
            mismatched += [others] if others and task.partners else []
            skipped += errors
            if task.last:
                yield StepBatch(micro_batches, task.after, task.figures, skipped, mismatched)
                micro_batches, mismatched, skipped = [], [], ()

    def tasks(self) -> Iterator[_Task]:
        """Yield the tasks of this replica, epoch after epoch."""
        position = self.start
        while position.epoch < self.epochs:
            batch: list[tuple[Any, balance.RowSize]] = []
            for handle, size, after in self.data.epoch(position):
                batch.append((handle, size))
                if len(batch) == self.batch_size:
                    yield from self._step(batch, after)
                    batch = []
            position = Position(position.epoch + 1)
            if batch:  # The last batch of an epoch may be smaller, since no row comes twice.
                yield from self._step(batch, position)

    def _step(self, batch: list[tuple[Any, balance.RowSize]], after: Position) -> Iterator[_Task]:
        sizes = [size for _, size in batch]
        plan = balance.plan_batch(sizes, self.replica.count, self.limits)
        figures, groups = BatchFigures.from_plan(sizes, plan), plan[self.replica.rank]
        for number, group in enumerate(groups or [[]]):
            handles = tuple(batch[row][0] for row in group)
            last = number + 1 >= len(groups)
            # As in TRL, the answer is that of the sample before; a single sample has no other.
            is_mixed = self.with_mismatched and len(batch) > 1
            partners = tuple(batch[row - 1][0] for row in group if is_mixed)
            yield _Task(handles, tuple(group), partners, last, after, figures)
