"""Sources of raw records: one small class for each way of reading, all with random access. Streams,
which have none, are in `stream.py`."""

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megatron_vlm.config.data_sources import HUB, SourceSpec
from megatron_vlm.data.sources.columns import (
    FieldNames,
    check_columns_exist,
    parse_cells,
    read_dataset_info,
)
from megatron_vlm.data.sources.csv_files import DELIMITERS, parse_row, scan_rows
from megatron_vlm.data.sources.tables import TableSource, load_by_name, missing_split, root_cause
from megatron_vlm.data.sources.tar import TarSource
from megatron_vlm.data.sources.text_files import (
    check_size,
    has_list,
    parse_json,
    parse_list,
    refuse_utf_16,
    scan_lines,
    unpacked_path,
)
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import no_file_error, real_path, require_file, require_files_in

TEXTS = (".jsonl", ".ndjson", ".json", *DELIMITERS)  # kinds of files, packed or not
_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")  # a data set on the Hub
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Source(Protocol):
    """Interface of a source for the rest of the data path."""

    name: str
    root: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def where(self, index: int) -> str: ...
    @property
    def digest(self) -> str: ...


def open_source(
    spec: SourceSpec,
    image_root: str | None,
    cache: Path | None,
    columns: Mapping[str, str] = _NOTHING,
    roles: Mapping[str, Any] = _NOTHING,
) -> Source:
    """Open the source of a spec. Its records are located but not read. `image_root`, `columns` and
    `roles` are those of the configuration, for a spec without its own."""
    spec, names = named_source(spec, columns, roles)
    source = _open_unnamed(spec, spec.image_root or image_root, cache)
    check_columns_exist(names, _keys_of_records(source), source.name)
    has_cells = isinstance(source, TextSource) and bool(source.headers)
    return NamedSource(source, names, has_cells) if names or has_cells else source


def named_source(
    spec: SourceSpec, columns: Mapping[str, str], roles: Mapping[str, Any]
) -> tuple[SourceSpec, FieldNames]:
    """Return the spec of a source and its names of columns, both as dataset_info.json has them."""
    if described := read_dataset_info(spec):
        return described
    own_columns = columns if spec.columns is None else spec.columns
    return spec, FieldNames.from_options(own_columns, roles if spec.roles is None else spec.roles)


def _open_unnamed(spec: SourceSpec, root: str | None, cache: Path | None) -> Source:
    paths = paths_of(spec)
    if not paths:
        is_name = _NAME.fullmatch(spec.path) and not Path(spec.path).suffix
        if is_name or spec.path.startswith(HUB):
            return _open_by_name(spec, root, cache)
        raise no_file_error(spec.path)
    folder = folder_of_source(paths[0])
    if Path(paths[0]).is_dir():
        return _open_folder(paths[0], spec, root or folder, cache)
    return _open_files(paths, spec, root or folder, cache)


def _open_files(paths: list[str], spec: SourceSpec, root: str, cache: Path | None) -> Source:
    for path in paths:
        require_file(path)
    kinds = {kind_of_file(path) for path in paths}
    if len(kinds) > 1:
        raise ConfigError(
            f"matches files of several kinds: {', '.join(sorted(kinds))}", place=spec.path
        )
    kind = kinds.pop()
    if kind == ".tar":
        return TarSource(paths, root)
    if kind in (".parquet", ".arrow"):
        return TableSource(_read_tables(kind[1:], paths), spec.path, root)
    if (suffix := unpacked_kind(kind)) in TEXTS:
        files = [unpacked_path(path, cache) for path in paths]
        for file, path in zip(files, paths, strict=True):
            refuse_utf_16(file, path)
        if suffix == ".json" and all(map(has_list, files)):
            return ListSource(files, paths, spec.path, root)
        return TextSource(files, paths, root, DELIMITERS.get(suffix))
    raise ConfigError(
        "has a name that does not tell the format",
        place=spec.path,
        allowed=".jsonl, .json, .csv, .tsv (each also with .gz or .zst), .parquet, .arrow, .tar, a "
        "folder of such files or of save_to_disk, or the name of a Hugging Face data set",
    )


def kind_of_file(path: str) -> str:
    """Return the suffix of a file's name, with the one before it for a compressed file."""
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:]) if path.endswith((".gz", ".zst")) else Path(path).suffix


def unpacked_kind(kind: str) -> str:
    """Return the suffix of a file once it is unpacked."""
    return kind.removesuffix(".gz").removesuffix(".zst")


def paths_of(spec: SourceSpec) -> list[str]:
    """Return the files or folders that a spec names, in the order of their names."""
    return sorted(glob.glob(os.path.expanduser(spec.path), recursive=True))


def folder_of_source(path: str) -> str:
    """Return the default folder of the images of a file, or of a folder of files."""
    resolved = real_path(path)
    return str(resolved if resolved.is_dir() else resolved.parent)


class NamedSource:
    """A source whose records are renamed. With `has_cells`, lists are text cells of JSON."""

    def __init__(self, source: Source, names: FieldNames, has_cells: bool):
        self.source, self.names, self.has_cells = source, names, has_cells
        self.name, self.root = source.name, source.root

    @cached_property
    def digest(self) -> str:
        names = asdict(self.names) | {"unread": sorted(self.names.unread)}
        text = json.dumps([self.source.digest, names, self.has_cells], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        where = self.where(index)
        record = self.names.rename(self.source[index], where)
        return parse_cells(record, where) if self.has_cells else record

    def where(self, index: int) -> str:
        return self.source.where(index)


def _keys_of_records(source: Source) -> Iterable[Collection[str]]:
    """Yield the keys of each readable record, or of all at once for a table."""
    if isinstance(source, TableSource) or (isinstance(source, TextSource) and source.headers):
        yield source.columns
        return
    for index in range(len(source)):
        with contextlib.suppress(DataError):  # it is raised where the record is encoded
            if isinstance(raw := source[index], Mapping):
                yield raw.keys()


class TextSource:
    """Records from JSON lines or, with a delimiter, from rows of cells, located by one scan."""

    def __init__(
        self, files: Sequence[str], names: Sequence[str], root: str, delimiter: str | None
    ):
        self.files, self.names, self.root = list(files), list(names), root
        self.delimiter = delimiter
        self.name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        hasher = hashlib.blake2b((delimiter or "").encode(), digest_size=16)
        self.headers: list[list[str]] = []
        scanned = []
        for file, name in zip(self.files, self.names, strict=True):
            if delimiter is None:
                scanned.append(scan_lines(file, hasher))
            else:
                header, spans, lines = scan_rows(file, name, delimiter, hasher)
                self.headers.append(header)
                scanned.append((spans, lines))
        self.digest = hasher.hexdigest()
        self.spans = np.concatenate([spans for spans, _ in scanned])
        self.lines = np.concatenate([lines for _, lines in scanned])
        self.file_of = np.repeat(range(len(files)), [len(lines) for _, lines in scanned])

    @property
    def columns(self) -> list[str]:
        """Names of the columns of all files of rows."""
        return list(dict.fromkeys(name for header in self.headers for name in header))

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        (start, end), where = self.spans[index].tolist(), self.where(index)
        check_size(end - start, where)
        number = self.file_of[index]
        with open(self.files[number], "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        if self.delimiter is None:
            return parse_json(content, where)
        return parse_row(content, self.headers[number], self.delimiter, where)

    def where(self, index: int) -> str:
        return f"{self.names[self.file_of[index]]}:{self.lines[index]}"


class ListSource:
    """Records in memory, from .json files that hold a list."""

    def __init__(self, files: Sequence[str], names: Sequence[str], name: str, root: str):
        self.name, self.root = name, root
        self.records: list[tuple[str, Any]] = []  # place and content
        for file, path in zip(files, names, strict=True):
            records = parse_list(Path(file).read_bytes(), path)
            self.records += [(f"{path}: record {i}", record) for i, record in enumerate(records)]

    @cached_property
    def digest(self) -> str:
        text = json.dumps([record for _, record in self.records], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index][1]

    def where(self, index: int) -> str:
        return self.records[index][0]


def _read_tables(kind: str, paths: Sequence[str]) -> Any:
    import datasets

    try:
        if kind == "parquet":
            return datasets.Dataset.from_parquet(list(paths))
        return datasets.concatenate_datasets([datasets.Dataset.from_file(p) for p in paths])
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(
            f"is not a readable {kind} file: {root_cause(error)}", place=paths[0]
        ) from error


def _open_folder(path: str, spec: SourceSpec, root: str, cache: Path | None) -> Source:
    import datasets

    folder = Path(path)
    require_files_in(folder)
    if not any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _open_by_name(spec, root, cache)
    try:
        dataset, name = datasets.load_from_disk(path), path
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(f"cannot be read: {root_cause(error)}", place=path) from error
    if isinstance(dataset, datasets.DatasetDict):
        if spec.split not in dataset:
            raise missing_split(path, spec.split, dataset)
        dataset, name = dataset[spec.split], f"{path}[{spec.split}]"
    return TableSource(dataset, name, root)


def _open_by_name(spec: SourceSpec, root: str | None, cache: Path | None) -> Source:
    root = root or os.getcwd()
    if isinstance(loaded := load_by_name(spec), list):
        return _open_files(loaded, spec, root, cache)
    return TableSource(loaded, f"{spec.path.removeprefix(HUB)}[{spec.split}]", root)
