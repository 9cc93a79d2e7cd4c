"""An ordered set of samples, taken from all sources of data.train or of one evaluation set."""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.objective_configs import RecordKind
from megatron_vlm.config.objectives import reference_folder
from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.config.teachers import target_folder
from megatron_vlm.data.batches.balance import RowSize, WorkModel
from megatron_vlm.data.batches.order import Order, Position, choose_held_out, order_of_all
from megatron_vlm.data.batches.stream_set import StreamSet
from megatron_vlm.data.scores.score_lookup import ReferenceScores, TeacherTargets
from megatron_vlm.data.sources.source import Source, open_source
from megatron_vlm.data.sources.stream import open_stream
from megatron_vlm.data.tokens.index import Index, build_index, check_errors
from megatron_vlm.data.tokens.reader import Reader, make_encoder, make_reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example, rules_and_remedy
from megatron_vlm.data.tokens.sample_views import ShownSample, show_example
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.scratch import scratch_folder
from megatron_vlm.io.untrusted import home_path

log = logging.getLogger("megatron_vlm.data")

Handle = tuple[int, int]  # (source, sample)


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
    def cut(self) -> int:
        """Number of records that data.truncation has cut."""
        return sum(index.faults.cut for index in self.indexes)


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
        dropped, errors = data.faults()
        rules, remedy = rules_and_remedy(dropped)
        raise NoSampleError(
            f"has no sample left: {dropped.total()} were dropped{rules}, and {len(errors)} were "
            "wrong",
            data=data,
            key=key,
            remedy=remedy,
        )
    if kind == "label" and train:
        _check_labels(indexes, key)
    return data


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
