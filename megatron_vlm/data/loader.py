"""From sources to the micro-batches of each step, decoded ahead of it by worker processes.

One process of a replica loads (`share.py` hands its micro-batches to the others). What comes next
is decided from sizes alone, the same on every replica: the loaders need no word with each other,
and to resume means to go on counting. Nothing that was consumed is decoded again.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from megatron_vlm.config import DataConfig
from megatron_vlm.data.batch import MicroBatch, PlacedRow, collate, filler_batch
from megatron_vlm.data.batching import Limits, RowSize, plan_batch
from megatron_vlm.data.feed import Reader, make_encoder, make_reader
from megatron_vlm.data.index import Index, build_index, check_errors
from megatron_vlm.data.order import Order, all_of
from megatron_vlm.data.processes import in_processes
from megatron_vlm.data.sources import Source, open_source, parse_specs
from megatron_vlm.errors import DataError
from megatron_vlm.flops import WorkModel

Handle = tuple[int, int]  # (source, sample)


@dataclass(frozen=True)
class Position:
    """Where in the data a run is: all that a checkpoint needs to know of it."""

    epoch: int = 0
    taken: int = 0  # samples of this epoch


@dataclass(frozen=True)
class Replica:
    """Which data parallel replica loads, of how many."""

    rank: int = 0
    count: int = 1


@dataclass(frozen=True)
class StepBatch:
    """One replica's part of a global batch."""

    micro_batches: list[MicroBatch]
    after: Position  # where the next step goes on
    work: float  # operations of the whole global batch's forward
    samples: int  # of the whole global batch
    skipped: tuple[str, ...] = ()  # errors of samples left out, of this replica


@dataclass(frozen=True)
class DataSet:
    """All sources of data.train, or of one evaluation set, indexed."""

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    indexes: tuple[Index, ...]
    order: Order
    work: WorkModel

    def size(self, source: int, sample: int) -> RowSize:
        index = self.indexes[source]
        tokens, patches = int(index.tokens[sample]), int(index.patches[sample])
        cost = self.work.row(
            tokens, int(index.supervised[sample]), patches, int(index.patch_pairs[sample])
        )
        return RowSize(tokens, float(cost), patches)

    def row(self, handle: Handle) -> PlacedRow:
        """The sample with its pixels, from the source."""
        source, sample = handle
        index = self.indexes[source]
        record = int(index.records[sample])
        where = self.sources[source].where(record)
        raw = self.sources[source][record]
        return self.readers[source].row(raw, where, index[sample])

    def faults(self) -> tuple[Counter[str], list[str]]:
        """Dropped samples by rule, and the errors of wrong ones, over all sources."""
        dropped = sum((index.faults.dropped for index in self.indexes), Counter[str]())
        return dropped, [error for index in self.indexes for error in index.faults.errors]


def open_data(
    value: Any,
    key: str,
    cfg: DataConfig,
    model_path: str,
    hf_config: PretrainedConfig,
    replica: Replica = Replica(),
    train: bool = True,
) -> DataSet:
    """Open and index every source of `data.train` or `data.eval`."""
    encoder = make_encoder(model_path, cfg)
    cache = None if cfg.cache_dir is None else Path(cfg.cache_dir).expanduser()
    specs = parse_specs(value, key)
    sources = tuple(open_source(spec, cfg.image_root, cache) for spec in specs)
    readers = tuple(make_reader(encoder, cfg, hf_config, source.root) for source in sources)
    scratch = Path(tempfile.mkdtemp(prefix="megatron_vlm-"))
    indexes = tuple(
        build_index(source, reader, cfg, scratch, (replica.rank, replica.count))
        for source, reader in zip(sources, readers, strict=True)
    )
    lengths = tuple(len(index) for index in indexes)
    order = all_of(lengths)
    if train:
        order = Order(lengths, tuple(spec.weight for spec in specs), cfg.seed, cfg.shuffle)
    data = DataSet(sources, readers, indexes, order, WorkModel.of(hf_config))
    check_errors(data.faults()[1], cfg)
    if not len(order):
        dropped, errors = data.faults()
        raise DataError(
            f"{key}: no sample is left: {sum(dropped.values())} dropped {dict(dropped)}, "
            f"{len(errors)} wrong"
        )
    return data


@dataclass(frozen=True)
class _Task:
    """What a worker process makes: one micro-batch."""

    handles: tuple[Handle, ...]
    places: tuple[int, ...]  # of its rows in the replica's part
    last: bool  # of its step
    after: Position
    work: float
    samples: int


class _Tasks:
    """The tasks of a replica, epoch after epoch: a DataLoader's sampler."""

    def __init__(
        self,
        data: DataSet,
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
            order = self.data.order.epoch(position.epoch)
            while position.taken < len(order):
                chosen = order[position.taken : position.taken + self.batch_size]
                taken = position.taken + len(chosen)
                after = Position(position.epoch, taken)
                if taken == len(order):
                    after = Position(position.epoch + 1, 0)
                yield from self._step(chosen, after)
                position = Position(position.epoch, taken)
            position = Position(position.epoch + 1, 0)

    def _step(self, chosen: np.ndarray, after: Position) -> Iterator[_Task]:
        handles: list[Handle] = [tuple(pair) for pair in chosen.tolist()]
        sizes = [self.data.size(*handle) for handle in handles]
        mine = plan_batch(sizes, self.replica.count, self.limits)[self.replica.rank]
        work = sum(size.cost for size in sizes)
        for number, group in enumerate(mine or [[]]):
            yield _Task(
                tuple(handles[row] for row in group),
                tuple(group),
                number + 1 >= len(mine),
                after,
                work,
                len(handles),
            )


class _Decoded:
    """Tasks carried out, for worker processes."""

    def __init__(self, data: DataSet, cfg: DataConfig):
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

    data: DataSet
    cfg: DataConfig
    batch_size: int  # of the global batch
    limits: Limits
    replica: Replica = Replica()
    start: Position = Position()
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
            check_errors([*self.data.faults()[1], *self.errors], self.cfg)
            micro_batches.append(outcome)
            skipped += errors
            if task.last:
                yield StepBatch(micro_batches, task.after, task.work, task.samples, skipped)
                micro_batches, skipped = [], ()
