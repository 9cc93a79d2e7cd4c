"""Streams: Hugging Face data sets with `streaming: true`, read window by window without an index.
The order within a window depends only on the seed, the epoch and the window's number: a run resumes
at the start of its window and skips the records that it had already taken."""

import codecs
import contextlib
import copy
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.sources.columns import FieldNames, check_columns_exist, parse_cells
from megatron_vlm.data.sources.csv_files import DELIMITERS, iter_rows, parse_header, parse_row
from megatron_vlm.data.sources.source import (
    TEXTS,
    folder_of_source,
    kind_of_file,
    named_source,
    paths_of,
    unpacked_kind,
)
from megatron_vlm.data.sources.tables import load_by_name, root_cause, table_row
from megatron_vlm.data.sources.tar import TarSource, join_members
from megatron_vlm.data.sources.text_files import (
    begins_list,
    content_of,
    iter_lines,
    parse_json,
    parse_list,
    too_large_error,
)
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile, require_file, require_files_in

_TABLES = (".parquet", ".arrow")  # read by `datasets`
# Records that are read here have these columns. Their bytes are parsed later, where an error can
# be skipped.
_WHERE, _CONTENT = "__where__", "__content__"
_LINE, _ROW, _HEADER = "a line", "a row", "the header"  # no name of a member has a space


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
        if _ROW in members:
            delimiter, header = json.loads(members[_HEADER])
            cells = parse_row(members[_ROW], header, delimiter, self.where)
            return parse_cells(self.names.rename(cells, self.where), self.where)
        if _LINE in members:
            return self.names.rename(parse_json(members[_LINE], self.where), self.where)
        return self.names.rename(join_members(members, self.where), self.where)


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

    named = [named_source(spec, cfg.columns, cfg.roles) for spec in specs]
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
    firsts = [next(iter(paths_of(spec)), None) for spec in specs]
    roots = {os.getcwd() if first is None else folder_of_source(first) for first in firsts}
    return roots.pop() if len(roots) == 1 else None


def _open(spec: SourceSpec) -> Any:
    import datasets

    paths = paths_of(spec)
    if not paths or os.path.isdir(paths[0]):
        for folder in paths:
            require_files_in(folder)
        paths = load_by_name(spec, streaming=True)
        if not isinstance(paths, list):
            return paths
    else:
        for path in paths:
            require_file(path)
    suffix = unpacked_kind(kind := kind_of_file(paths[0]))
    readers = dict.fromkeys(TEXTS, _lines) | dict.fromkeys(DELIMITERS, _rows) | {".tar": _samples}
    if reader := readers.get(suffix, None if suffix == kind else _lines):
        text, data = datasets.Value("string"), datasets.Value("large_binary")
        return datasets.IterableDataset.from_generator(
            reader,
            features=datasets.Features({_WHERE: text, _CONTENT: [{"name": text, "content": data}]}),
            gen_kwargs={"paths": paths},
        )
    if suffix not in _TABLES:
        known = (*readers, *_TABLES)
        raise ConfigError("cannot be streamed", place=spec.path, allowed=known)
    try:
        return datasets.load_dataset(
            suffix[1:], data_files={spec.split: paths}, split=spec.split, streaming=True
        )
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(f"cannot be streamed: {root_cause(error)}", place=spec.path) from error


def _record_place(table: Any) -> str | None:
    """Return the place of a record that was read here, or None if `datasets` read it."""
    known = _WHERE in table.column_names
    return table[_WHERE][0].as_py() if known else None


def _lines(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of files without parsing them, because a wrong one may be skipped."""
    for path in paths:
        blocks = content_of(path)
        first = next(blocks, b"")
        if unpacked_kind(kind_of_file(path)) == ".json" and begins_list(first):
            for number, record in enumerate(parse_list(b"".join((first, *blocks)), path)):
                members = [{"name": _LINE, "content": json.dumps(record).encode()}]
                yield {_WHERE: f"{path}: record {number}", _CONTENT: members}
            continue
        for number, line in enumerate(iter_lines(itertools.chain((first,), blocks)), 1):
            where = f"{path}:{number}"
            line = line.removeprefix(codecs.BOM_UTF8) if line and number == 1 else line
            if line is None:
                yield {_WHERE: where}
            elif line.strip():
                yield {_WHERE: where, _CONTENT: [{"name": _LINE, "content": line}]}


def _rows(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of files of cells, with their headers. A wrong row may be skipped, too."""
    for path in paths:
        delimiter = DELIMITERS[unpacked_kind(kind_of_file(path))]
        rows = iter_rows(content_of(path), path, delimiter)
        header = json.dumps([delimiter, parse_header(next(rows, None), path, delimiter)]).encode()
        for line, _, content in rows:
            members = [{"name": _ROW, "content": content}, {"name": _HEADER, "content": header}]
            yield {_WHERE: f"{path}:{line}", _CONTENT: members}


def _samples(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of WebDataset shards."""
    for path in paths:
        source = TarSource([path], "")
        for index in range(len(source)):
            where, members = source.where(index), source.members(index)
            content = [{"name": name, "content": value} for name, value in members.items()]
            yield {_WHERE: where, _CONTENT: content}
