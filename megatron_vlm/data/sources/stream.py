"""Streams: Hugging Face data sets with `streaming: true`, read window by window.

Nothing is indexed. Records are shuffled within a window, in an order that depends only on the seed,
the epoch and the window's number; a run resumes at the start of its window and skips the records
that it had already taken.
"""

import codecs
import copy
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.sources.source import folder_of_source, paths_of
from megatron_vlm.data.sources.tables import load_by_name, root_cause, table_row
from megatron_vlm.data.sources.tar import TarSource, join_members
from megatron_vlm.data.sources.text_files import content_of, iter_lines, parse_json, too_large_error
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile, require_file, require_files_in

_LINES = (".jsonl", ".ndjson", ".gz", ".zst")
_TABLES = (".parquet", ".arrow")  # read by `datasets`
# Records that are read here have these columns. Their bytes are parsed later, where an error can
# be skipped.
_WHERE, _CONTENT = "__where__", "__content__"
_LINE = "a line"  # no name of a member has a space


@dataclass(frozen=True)
class StreamRecord:
    """A record as it was read, and the state of the stream after it."""

    table: Any  # one row, in Arrow format
    where: str
    state: dict[str, Any]

    def raw(self) -> Any:
        """Return the record as plain values."""
        raw = table_row(self.table, self.where)
        if _WHERE not in raw:
            return raw
        members = {member["name"]: member["content"] for member in raw.get(_CONTENT, ())}
        if not members:
            raise too_large_error(self.where)
        line = members.get(_LINE)
        return join_members(members, self.where) if line is None else parse_json(line, self.where)


@dataclass(frozen=True)
class Stream:
    """A stream, or a mix of several by their weights."""

    dataset: Any  # a data set of `datasets`, in Arrow format
    name: str
    root: str | None  # folder of its images
    window: int  # records that are shuffled together
    seed: int
    shuffle: bool

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
            generator = np.random.default_rng([self.seed, epoch, window])
            order = generator.permutation(len(tables)) if self.shuffle else np.arange(len(tables))
            for count, index in enumerate(order.tolist()):
                if count >= used:
                    where = _record_place(tables[index])
                    where = where or f"{self.name}: record {window * self.window + index}"
                    after = {"window": window, "used": count + 1, "state": read}
                    yield StreamRecord(tables[index], where, after)
            # The state is copied because the data set keeps changing its own.
            window, used, read = window + 1, 0, copy.deepcopy(dataset.state_dict())

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
    return Stream(dataset, name, root, cfg.shuffle_window, cfg.seed, train and cfg.shuffle)


def _root(specs: Sequence[SourceSpec], cfg: DataConfig) -> str | None:
    """Return the folder of the images: the configured one (checks.py: streams share it), or that of
    the files. Return None if the files lie in several folders, because a record does not name its
    file."""
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
        return load_by_name(spec, streaming=True)
    for path in paths:
        require_file(path)
    suffix = Path(paths[0]).suffix
    if suffix in _LINES or suffix == ".tar":
        text, data = datasets.Value("string"), datasets.Value("large_binary")
        return datasets.IterableDataset.from_generator(
            _samples if suffix == ".tar" else _lines,
            features=datasets.Features({_WHERE: text, _CONTENT: [{"name": text, "content": data}]}),
            gen_kwargs={"paths": paths},
        )
    if suffix not in _TABLES:
        known = (*_LINES, ".tar", *_TABLES)
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
        for number, line in enumerate(iter_lines(content_of(path)), 1):
            where = f"{path}:{number}"
            line = line.removeprefix(codecs.BOM_UTF8) if line and number == 1 else line
            if line is None:
                yield {_WHERE: where}
            elif line.strip():
                yield {_WHERE: where, _CONTENT: [{"name": _LINE, "content": line}]}


def _samples(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of WebDataset shards."""
    for path in paths:
        source = TarSource([path], "")
        for index in range(len(source)):
            where, members = source.where(index), source.members(index)
            content = [{"name": name, "content": value} for name, value in members.items()]
            yield {_WHERE: where, _CONTENT: content}
