"""StreamSet: samples of a stream, encoded while they are read."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.balance import RowSize, WorkModel
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.sources.arrow_tables import root_cause
from megatron_vlm.data.sources.stream import Stream, StreamRecord
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example, RecordDropped, rules_and_remedy
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import escape_controls

log = logging.getLogger("megatron_vlm.data")


@dataclass(frozen=True)
class Item:
    """A record on its way to the process that decodes its pixels."""

    raw: Any
    where: str
    example: Example
    passed: tuple[str, ...] = ()  # keys of the record that are not used


# The place of a record, the state of the stream after it (empty if no record can follow), and the
# result of encoding it.
Outcome = tuple[str, dict[str, Any], Item | RecordDropped | DataError]


@dataclass
class StreamSet:
    """The samples of a stream, as the loader takes them."""

    stream: Stream
    reader: Reader
    cfg: DataConfig
    work: WorkModel
    dropped: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    cut: int = 0  # records that data.truncation has cut so far
    passed: set[str] = field(default_factory=set)  # unused keys that were already reported
    known_ahead = False
    length = None

    @property
    def name(self) -> str:
        return self.stream.name

    def epoch(self, start: Position) -> Iterator[tuple[Item, RowSize, Position]]:
        """Yield the rest of an epoch: each sample, its size and the position after it."""
        taken = start.taken
        records = _EncodedRecords(self.stream, self.reader, start)
        # At most one process reads: with more, the order would depend on their number.
        for where, state, outcome in map_in_processes(
            records, None, min(self.cfg.num_workers, 1), 64
        ):
            if isinstance(outcome, RecordDropped):
                self.dropped[str(outcome)] += 1
                log.info("dropped %s: %s", escape_controls(where), outcome)
            elif isinstance(outcome, DataError):
                if not (self.cfg.max_errors and state):
                    raise outcome
                self.errors.append(str(outcome))
                log.warning("skipped %s", escape_controls(str(outcome)))
                check_errors(self.errors, self.cfg)
            else:
                taken += 1
                self.cut += any(sample.is_cut for sample in outcome.example)
                self._say_passed(outcome)
                yield (
                    outcome,
                    self.work.example_size(outcome.example),
                    Position(start.epoch, taken, state),
                )
        if not taken:
            rules, remedy = rules_and_remedy(self.dropped)
            raise DataError(
                f"has no sample left: {self.dropped.total()} were dropped{rules}, and "
                f"{len(self.errors)} were wrong",
                place=self.name,
                remedy=remedy,
            )

    def _say_passed(self, item: Item) -> None:
        """Warn of unused keys where they first appear: a stream cannot know them before."""
        new_keys = [key for key in item.passed if key not in self.passed]
        if new_keys and self.cfg.unknown_keys == "warn":
            names = ", ".join(repr(key[:80]) for key in new_keys)
            log.warning(
                "%s: the model does not see %s: its meaning is not known here; "
                "data.unknown_keys=refuse makes it an error, ignore silences this warning",
                escape_controls(item.where),
                escape_controls(names),
            )
        self.passed.update(new_keys)

    def rows(self, handle: Item) -> list[Row]:
        """Return the rows of the sample with their pixels."""
        return self.reader.rows(handle.raw, handle.where, handle.example)

    def example(self, handle: Item) -> Example:
        """Return the rows of the sample without their pixels."""
        return handle.example

    def reference(self, handle: Item) -> None:
        """Return nothing: a stream's samples are not known before they are trained."""

    def faults(self) -> tuple[Counter[str], list[str]]:
        """Return the number of samples that each rule dropped so far, and the errors of others."""
        return self.dropped, self.errors


@dataclass
class _EncodedRecords(IterableDataset[Outcome]):
    """The encoded records of an epoch from a position on, for a worker process."""

    stream: Stream
    reader: Reader
    start: Position

    def __iter__(self) -> Iterator[Outcome]:
        # Errors are yielded: a DataLoader would wrap the message of a raised error.
        where = "its beginning"
        records = iter(self.stream.records(self.start.epoch, self.start.stream))
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # networks, file systems and damaged files fail in many ways
                why = f"cannot be read any further after {where}: {root_cause(error)}"
                broken = DataError(why, place=self.stream.name)
                yield where, {}, error if isinstance(error, DataError) else broken
                return
            where = record.where
            yield where, record.state, self._encode(record)

    def _encode(self, record: StreamRecord) -> Item | RecordDropped | DataError:
        try:
            raw = record.raw()
            passed = Counter[str]()
            example = self.reader.encode_example(raw, record.where, passed)
            return Item(raw, record.where, example, tuple(passed))
        except (RecordDropped, DataError) as reason:
            return reason
