"""Streams: Hugging Face data sets with `streaming: true`, read window by window without an index.
The order within a window depends only on the seed, the epoch and the window's number: a run resumes
at the start of its window and skips the records that it had already taken."""

import contextlib
import copy
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.sources import source
from megatron_vlm.data.sources.arrow_tables import find_data, root_cause, table_row
from megatron_vlm.data.sources.columns import FieldNames, check_columns_exist, parse_cells
from megatron_vlm.data.sources.source import join_members
from megatron_vlm.data.sources.text_files import suffix_of, too_large_error
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile

# Records that are read here have these columns. Their bytes are parsed later, where an error can
# be skipped.
_WHERE, _CONTENT = "__where__", "__content__"


@dataclass(frozen=True)
class StreamRecord:
    """A record as it was read, and the state of the stream after it."""

    table: Any  # one row, in Arrow format
    where: str
    state: dict[str, Any]
    names: FieldNames

    def raw(self) -> Any:
        """Return the record as plain values, under the names that records have here."""
        raw = table_row(self.table, self.where)
        if _WHERE not in raw:
            return self.names.rename(raw, self.where)
        members = {member["name"]: member["content"] for member in raw.get(_CONTENT, ())}
        if not members:
            raise too_large_error(self.where)
        if source.TEXT not in members:
            return self.names.rename(join_members(members, self.where), self.where)
        form = source.TextForm(**json.loads(members[source.FORM]))
        record = self.names.rename(form.parse(members[source.TEXT], self.where), self.where)
        return parse_cells(record, self.where) if form.delimiter else record


@dataclass(frozen=True)
class Stream:
    """A stream, or a mix of several by their weights."""

    dataset: Any  # a data set of `datasets`, in Arrow format
    name: str
    root: str | None  # folder of its images
    window: int  # records that are shuffled together
    seed: int
    shuffle: bool
    names: FieldNames

    def records(self, epoch: int, state: dict[str, Any] | None) -> Iterator[StreamRecord]:
        """Yield the records of an epoch, from its start or from the state that a record carries."""
        state = state or {"window": 0, "used": 0, "state": None}
        window, used, read = state["window"], state["used"], state["state"]
        # A data set remembers how far it was read, even across calls of `iter`.
        dataset = copy.deepcopy(self.dataset)
        if read is not None:
            dataset.load_state_dict(read)
        records = iter(dataset)
        while tables := self._window(records):
            if not window and self.names:
                keys = self._keys_of(tables)
                check_columns_exist(self.names, keys, f"{self.name}: the first {len(tables):,}")
            generator = np.random.default_rng([self.seed, epoch, window])
            order = generator.permutation(len(tables)) if self.shuffle else np.arange(len(tables))
            for count, index in enumerate(order.tolist()):
                if count >= used:
                    where = _record_place(tables[index])
                    where = where or f"{self.name}: record {window * self.window + index}"
                    after = {"window": window, "used": count + 1, "state": read}
                    yield StreamRecord(tables[index], where, after, self.names)
            # The state is copied because the data set keeps changing its own.
            window, used, read = window + 1, 0, copy.deepcopy(dataset.state_dict())

    def _keys_of(self, tables: Sequence[Any]) -> Iterator[Collection[str]]:
        """Yield the keys of the records that can be read: of all at once for a table."""
        for table in tables:
            if (where := _record_place(table)) is None:
                yield table.column_names
                continue
            with contextlib.suppress(DataError):  # it is raised where the record is encoded
                raw = StreamRecord(table, where, {}, FieldNames()).raw()
                if isinstance(raw, Mapping):
                    yield raw.keys()

    def _window(self, records: Iterator[Any]) -> list[Any]:
        """Return the records of the next window, fewer at the end."""
        # Damage in a Parquet or Arrow file shows only as it is read.
        with UntrustedFile(self.name, remedy="download it again").wrap_errors(
            "cannot be read further"
        ):
            return list(itertools.islice(records, self.window))


def open_stream(specs: Sequence[SourceSpec], cfg: DataConfig, train: bool) -> Stream:
    """Open the streams of these specs, mixed by weight until each has been read to its end."""
    import datasets

    named = [source.named_source(spec, cfg.columns, cfg.roles) for spec in specs]
    specs, names = [spec for spec, _ in named], named[0][1]
    if any(other != names for _, other in named):
        raise ConfigError(
            ": streams that are mixed have the same columns and roles, and these differ",
            key="data.train",
            remedy="turn streaming off, or name the columns alike",
        )
    streams = [_open(spec) for spec in specs]
    mixed = streams[0]
    if len(streams) > 1:
        total = sum(spec.weight for spec in specs)
        mixed = datasets.interleave_datasets(
            streams,
            probabilities=[spec.weight / total for spec in specs],
            seed=cfg.seed,
            stopping_strategy="all_exhausted_without_replacement",
        )
    root = _root(specs, cfg)
    # Values stay in Arrow format: `datasets` would decode images without our limits.
    dataset, name = mixed.with_format("arrow"), " + ".join(spec.path for spec in specs)
    return Stream(dataset, name, root, cfg.shuffle_window, cfg.seed, train and cfg.shuffle, names)


def _root(specs: Sequence[SourceSpec], cfg: DataConfig) -> str | None:
    """Return the folder of the images: the configured one, which streams share (checks.py), or that
    of the files. It is None for several, since a record does not name its file."""
    if configured := specs[0].image_root or cfg.image_root:
        return configured
    roots = {source.default_root(spec) for spec in specs}
    return roots.pop() if len(roots) == 1 else None


def _open(spec: SourceSpec) -> Any:
    import datasets

    if not isinstance(paths := find_data(spec, streaming=True), list):
        return paths
    if not (kind := source.kind_of_file(paths[0])):
        raise ConfigError("cannot be streamed", place=spec.path, allowed=tuple(source.KINDS))
    if kind.iterate:
        text, data = datasets.Value("string"), datasets.Value("large_binary")
        return datasets.IterableDataset.from_generator(
            _records,
            features=datasets.Features({_WHERE: text, _CONTENT: [{"name": text, "content": data}]}),
            gen_kwargs={"paths": paths},
        )
    try:
        return datasets.load_dataset(
            suffix_of(paths[0])[1:],
            data_files={spec.split: paths},
            split=spec.split,
            streaming=True,
        )
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(f"cannot be streamed: {root_cause(error)}", place=spec.path) from error


def _records(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    kind = source.kind_of_file(paths[0])
    assert kind is not None and kind.iterate is not None
    for where, members in itertools.chain.from_iterable(map(kind.iterate, paths)):
        content = [{"name": name, "content": value} for name, value in members.items()]
        yield {_WHERE: where, _CONTENT: content}


def _record_place(table: Any) -> str | None:
    """Return the place of a record that was read here, or None if `datasets` read it."""
    known = _WHERE in table.column_names
    return table[_WHERE][0].as_py() if known else None
