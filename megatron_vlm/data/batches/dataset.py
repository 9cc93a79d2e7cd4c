"""An ordered set of samples, taken from all sources of data.train or of one evaluation set, and
StreamSet: samples of a stream, encoded while they are read."""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.objective_configs import RecordKind
from megatron_vlm.config.objectives import reference_folder
from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.config.teachers import target_folder
from megatron_vlm.data.batches.balance import RowSize, WorkModel
from megatron_vlm.data.batches.order import Order, Position, choose_held_out, order_of_all
from megatron_vlm.data.scores.score_file import ReferenceScores, TeacherTargets
from megatron_vlm.data.sources.arrow_tables import root_cause
from megatron_vlm.data.sources.source import Source, open_source
from megatron_vlm.data.sources.stream import Stream, StreamRecord, open_stream
from megatron_vlm.data.tokens.index import Index, build_index, check_errors
from megatron_vlm.data.tokens.reader import Reader, make_encoder, make_reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example, RecordDropped, rules_and_remedy
from megatron_vlm.data.tokens.sample_views import ShownSample, show_example
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.atomic import scratch_folder
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import home_path

log = logging.getLogger("megatron_vlm.data")

Handle = tuple[int, int]  # (source, sample)


@dataclass(frozen=True)
class Item:
    """A record on its way to the process that decodes its pixels."""

    raw: Any
    where: str
    example: Example
    unused_keys: tuple[str, ...] = ()  # keys of the record that are not used


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
    truncated: int = 0  # records that data.truncation has cut so far
    warned_keys: set[str] = field(default_factory=set)  # unused keys that were already reported
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
                self.truncated += any(sample.is_truncated for sample in outcome.example)
                self._warn_unused_keys(outcome)
                yield (
                    outcome,
                    self.work.example_size(outcome.example),
                    Position(start.epoch, taken, state),
                )
        if not taken:
            raise _none_left(self.dropped, self.errors, place=self.name)

    def _warn_unused_keys(self, item: Item) -> None:
        """Warn of unused keys where they first appear: a stream cannot know them before."""
        new_keys = [key for key in item.unused_keys if key not in self.warned_keys]
        if new_keys and self.cfg.unknown_keys == "warn":
            names = ", ".join(repr(key[:80]) for key in new_keys)
            log.warning(
                "%s: the model does not see %s: its meaning is not known here; "
                "data.unknown_keys=refuse makes it an error, ignore silences this warning",
                escape_controls(item.where),
                escape_controls(names),
            )
        self.warned_keys.update(new_keys)

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
            unused_keys = Counter[str]()
            example = self.reader.encode_example(raw, record.where, unused_keys)
            return Item(raw, record.where, example, tuple(unused_keys))
        except (RecordDropped, DataError) as reason:
            return reason


@dataclass(frozen=True)
class DataSet:
    """The indexed sources, their readers, and the order of their samples."""

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    indexes: tuple[Index, ...]
    order: Order
    work: WorkModel
    # For each source, of each sample's rows [samples, rows]: from preference.reference, or
    # see training/reference.py.
    reference_log_probs: tuple[np.ndarray, ...] | None = None
    teacher: TeacherTargets | None = None
    known_ahead = True

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return len(self.order)

    def size(self, source: int, sample: int) -> RowSize:
        """Return the size of a sample, as planning needs it."""
        index = self.indexes[source]
        columns = (index.supervised, index.patches, index.patch_pairs, index.images)
        supervised, patches, pairs, images = (int(column[sample]) for column in columns)
        lengths = index.lengths(sample)
        cost, rows = float(self.work.row(lengths, supervised, patches, pairs)), len(lengths)
        longest = max(lengths) if rows > 1 else None
        return RowSize(sum(lengths), cost, patches, images, rows, longest)

    def epoch(self, start: Position) -> Iterator[tuple[Handle, RowSize, Position]]:
        """Yield the rest of an epoch: each sample, its size and the position after it."""
        order = self.order.epoch(start.epoch)
        for taken in range(start.taken, len(order)):
            handle = (int(order[taken, 0]), int(order[taken, 1]))
            yield handle, self.size(*handle), Position(start.epoch, taken + 1)

    def where(self, handle: Handle) -> str:
        """Return the place of the sample's record, for messages."""
        source, sample = handle
        return self.sources[source].where(int(self.indexes[source].records[sample]))

    def raw(self, handle: Handle) -> Any:
        """Return the sample's record as its source has it."""
        source, sample = handle
        return self.sources[source][int(self.indexes[source].records[sample])]

    def rows(self, handle: Handle) -> list[Row]:
        """Return the rows of the sample with their pixels."""
        source, sample = handle
        reader, index = self.readers[source], self.indexes[source]
        teach = None
        if self.teacher is not None:
            teach = partial(self.teacher.taught, digest=int(index.digests[sample]))
        return reader.rows(self.raw(handle), self.where(handle), index.example(sample), teach)

    def row(self, handle: Handle) -> Row:
        """Return the sample's first row with its pixels, such as the chosen answer of a pair."""
        source, sample = handle
        reader, index = self.readers[source], self.indexes[source]
        chat, _ = reader.chats(self.raw(handle), self.where(handle))[0]
        return reader.row_of_chat(chat, index[sample])

    def example(self, handle: Handle) -> Example:
        """Return the rows of the sample without their pixels."""
        source, sample = handle
        return self.indexes[source].example(sample)

    def reference(self, handle: Handle) -> list[float] | None:
        """Return the log-prob of each row under the reference model, if it is known."""
        if self.reference_log_probs is None:
            return None
        source, sample = handle
        rows = int(self.indexes[source].rows[sample])
        return [float(value) for value in self.reference_log_probs[source][sample, :rows]]

    @property
    def reader(self) -> Reader:
        """The reader of the first source; the other readers differ in their folders alone."""
        return self.readers[0]

    def handle(self, number: int) -> Handle:
        """Return the sample with this number, counted over all sources."""
        source, sample = 0, number
        while sample >= len(self.indexes[source]):
            source, sample = source + 1, sample - len(self.indexes[source])
        return source, sample

    def show(
        self, handle: Handle, pictures: bool, number: int = 0, all_answers: bool = True
    ) -> ShownSample:
        """Return the sample as the model sees it; `number` is its number over all sources. Of a
        pair, both answers are shown, or only the chosen one without `all_answers`."""
        source, sample = handle
        raw, where = self.raw(handle), self.where(handle)
        reader, index = self.readers[source], self.indexes[source]
        example = index.example(sample)[: None if all_answers else 1]
        return show_example(reader, raw, where, example, pictures, number)

    def faults(self) -> tuple[Counter[str], list[str]]:
        """Return the number of samples that each rule dropped, and the errors of wrong records."""
        faults = [index.faults for index in self.indexes]
        dropped = Counter(rule for fault in faults for _, rule in fault.dropped)
        return dropped, [error for fault in faults for error in fault.errors]

    @property
    def truncated(self) -> int:
        """Number of records that data.truncation has cut."""
        return sum(index.faults.truncated for index in self.indexes)


class NoSampleError(DataError):
    """Error about a set without a sample; `data` has its faults in the process that opened it."""

    def __init__(self, problem: str = "", *, data: DataSet | None = None, **fields: Any) -> None:
        super().__init__(problem, **fields)
        self.data = data


def open_data(
    specs: Sequence[SourceSpec],
    key: str,
    cfg: DataConfig,
    model_path: str,
    sizes: ModelSizes,
    share: tuple[int, int] = (0, 1),
    train: bool = True,
    kind: RecordKind = "chat",
    held_out: bool = False,
) -> DataSet | StreamSet:
    """Open and index every source of `data.train` or `data.eval`; streams are only opened. If
    several processes index together, `share` is the index of this process and their number. `kind`
    is that of the records; if it is prompt, no token is trained. With `train` the records that
    data.split holds out are left out; with `held_out` there are no others."""
    encoder = make_encoder(model_path, cfg)
    cache = None if cfg.cache_dir is None else home_path(cfg.cache_dir)
    if any(spec.streaming for spec in specs):
        assert all(spec.streaming for spec in specs)
        stream = open_stream(specs, cfg, train)
        reader = make_reader(encoder, cfg, sizes, stream.root, kind)
        return StreamSet(stream, reader, cfg, WorkModel.from_sizes(sizes))
    sources = tuple(
        open_source(spec, cfg.image_root, cache, cfg.columns, cfg.roles) for spec in specs
    )
    readers = tuple(make_reader(encoder, cfg, sizes, source.root, kind) for source in sources)
    scratch = Path(tempfile.mkdtemp(dir=scratch_folder()))
    indexes = tuple(
        build_index(source, reader, cfg, scratch, share)
        for source, reader in zip(sources, readers, strict=True)
    )
    if cfg.split is not None and (train or held_out):
        chosen = choose_held_out(indexes, cfg)
        indexes = tuple(
            index.only(part if held_out else ~part)
            for index, part in zip(indexes, chosen, strict=True)
        )
    lengths = tuple(len(index) for index in indexes)
    order = order_of_all(lengths)
    if train:
        order = Order(lengths, tuple(spec.weight for spec in specs), cfg.seed, cfg.shuffle)
    data = DataSet(sources, readers, indexes, order, WorkModel.from_sizes(sizes))
    for index in indexes:
        for where, rule in index.faults.dropped:
            log.info("dropped %s: %s", escape_controls(where), rule)
        for error in index.faults.errors:
            log.warning("skipped %s", escape_controls(error))
    check_errors(data.faults()[1], cfg)
    if not len(order):
        raise _none_left(*data.faults(), data=data, key=key)
    if kind == "label" and train:
        _check_labels(indexes, key)
    return data


def _none_left(dropped: Counter[str], errors: Sequence[str], **fields: Any) -> NoSampleError:
    rules, remedy = rules_and_remedy(dropped)
    return NoSampleError(
        f"has no sample left: {dropped.total()} were dropped{rules}, and {len(errors)} were wrong",
        remedy=remedy,
        **fields,
    )


def _check_labels(indexes: Sequence[Index], key: str) -> None:
    """Refuse answers that all have the same label."""
    answers = sum(int(index.rows.sum()) for index in indexes)
    rejected = sum(int(index.rejected.sum()) for index in indexes)
    if rejected in (0, answers):
        raise DataError(
            f": all {answers:,} answers are labelled as {'bad' if rejected else 'good'}, and kto "
            "compares good ones with bad ones",
            key=key,
            remedy="add answers with the other label; good answers alone are for "
            "train.objective=sft",
        )


def with_scores(data: DataSet | StreamSet, cfg: Config) -> DataSet | StreamSet:
    """Return the data with the stored scores that the objective reads: a teacher's targets, or the
    log-probs of a reference. Each sample must have its own."""
    targets, reference = target_folder(cfg), reference_folder(cfg)
    if targets is None and reference is None:
        return data
    assert isinstance(data, DataSet), "config/teachers.py refuses streams"
    vocabulary = data.reader.encoder.renderer.tokenizer.get_vocab()
    places = [partial(_where, data, source) for source in range(len(data.indexes))]
    if targets is not None:
        teacher = TeacherTargets.open(targets, cfg.teacher.top_k, vocabulary)
        for index, where in zip(data.indexes, places, strict=True):
            teacher.check(index, where)
        return replace(data, teacher=teacher)
    assert reference is not None
    scores = ReferenceScores(reference, vocabulary)
    tables = tuple(map(scores.table, data.indexes, places))
    return replace(data, reference_log_probs=tables)


def _where(data: DataSet, source: int, sample: int) -> str:
    return data.where((source, sample))
