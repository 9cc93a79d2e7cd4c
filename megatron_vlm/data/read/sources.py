"""Where raw records come from: one small class for each way of reading, all with random access.

A source answers `len`, `source[i]` (a raw dict), `where(i)` (for messages), `digest` (of its
content) and `root` (where its images lie). Streams, which have none of these, are in `stream.py`.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow

from megatron_vlm.data.read.files import scan_lines, unpacked
from megatron_vlm.data.read.tar import TarSource
from megatron_vlm.errors import ConfigError, DataError


@dataclass(frozen=True)
class SourceSpec:
    """One entry of data.train or data.eval."""

    path: str  # file, glob, folder, or the name of a Hugging Face data set
    weight: float = 1.0  # how often each record comes in an epoch; 0.5: every other epoch
    split: str = "train"  # of a Hugging Face data set
    subset: str | None = None  # its configuration
    streaming: bool = False  # read a Hugging Face data set as it comes
    image_root: str | None = None  # null: data.image_root


class Source(Protocol):
    """What the rest of the data path needs of a source."""

    name: str
    root: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def where(self, index: int) -> str: ...
    @property
    def digest(self) -> str: ...


def parse_specs(value: Any, key: str) -> tuple[SourceSpec, ...]:
    """data.train as specs: a string, a mapping, or a list of those."""
    if value is None:
        raise ConfigError(f"{key} is not set; give it as {key}=FILE")
    entries = list(value) if isinstance(value, list | tuple) else [value]
    known = [field.name for field in fields(SourceSpec)]
    specs = []
    for entry in entries:
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or "path" not in entry or set(entry) - set(known):
            raise ConfigError(f"{key}: {entry!r} is not a path or an object of {', '.join(known)}")
        spec = SourceSpec(**entry)
        if not isinstance(spec.weight, int | float) or not 0 < spec.weight < 1000:
            raise ConfigError(f"{key}: weight of {spec.path} is {spec.weight!r}; give 0 to 1000")
        specs.append(spec)
    if not specs:
        raise ConfigError(f"{key} is an empty list; give at least one source")
    return tuple(specs)


def open_source(spec: SourceSpec, image_root: str | None, cache: Path | None) -> Source:
    """The source of a spec, its index built, nothing else read."""
    root = spec.image_root or image_root
    paths = sorted(glob.glob(os.path.expanduser(spec.path), recursive=True))
    if not paths:
        if re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", spec.path) and not Path(spec.path).suffix:
            return _hub_source(spec, root)
        raise ConfigError(f"no file or folder {spec.path}")
    folder = str(Path(paths[0]).resolve().parent)
    kinds = {
        "".join(Path(path).suffixes[-2:]) if path.endswith((".gz", ".zst")) else Path(path).suffix
        for path in paths
    }
    if len(kinds) > 1:
        raise ConfigError(f"{spec.path} matches files of several kinds: {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    if kind == ".tar":
        return TarSource(paths, root or folder)
    if kind in (".parquet", ".arrow"):
        return TableSource(_read_tables(kind[1:], paths), spec.path, root or folder)
    if kind == ".json":
        return ListSource(_read_json(paths), spec.path, root or folder)
    if kind in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"):
        return JsonlSource([unpacked(path, cache) for path in paths], paths, root or folder)
    if Path(paths[0]).is_dir():
        return _open_folder(paths[0], spec, root or str(Path(paths[0]).resolve()))
    raise ConfigError(
        f"{spec.path}: cannot tell the format; known are .jsonl, .jsonl.gz, .jsonl.zst, .json, "
        ".parquet, .arrow, .tar, a folder of save_to_disk, or the name of a Hugging Face data set"
    )


def _kind(path: str) -> str:
    packed = path.endswith((".gz", ".zst"))
    return "".join(Path(path).suffixes[-2:] if packed else Path(path).suffixes[-1:])


class JsonlSource:
    """JSON lines; one scan finds where the lines begin and what the digest is."""

    def __init__(self, files: Sequence[str], names: Sequence[str], root: str):
        self.files, self.names, self.root = list(files), list(names), root
        self.name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        hasher = hashlib.blake2b(digest_size=16)
        scanned = [scan_lines(file, hasher) for file in self.files]
        self.digest = hasher.hexdigest()
        self.spans = np.concatenate([spans for spans, _ in scanned])
        self.lines = np.concatenate([lines for _, lines in scanned])
        self.file_of = np.repeat(range(len(files)), [len(lines) for _, lines in scanned])

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        start, end = self.spans[index]
        with open(self.files[self.file_of[index]], "rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            return json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.where(index)}: not a line of JSON: {error}") from error
        except RecursionError:
            raise DataError(f"{self.where(index)}: nested too deeply") from None

    def where(self, index: int) -> str:
        return f"{self.names[self.file_of[index]]}:{self.lines[index]}"


class ListSource:
    """Records in memory: a .json file with one list."""

    def __init__(self, records: list[tuple[str, Any]], name: str, root: str):
        self.records, self.name, self.root = records, name, root

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


class TableSource:
    """A table of Hugging Face `datasets`: Parquet, Arrow, save_to_disk, the Hub."""

    def __init__(self, dataset: Any, name: str, root: str):
        # Arrow's own values: no image is decoded here, with the limits of somebody else.
        self.dataset = dataset.with_format("arrow")
        self.name, self.root = name, root

    @property
    def digest(self) -> str:
        return str(self.dataset._fingerprint)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return table_row(self.dataset[int(index)])

    def where(self, index: int) -> str:
        return f"{self.name}: row {index}"


def table_row(table: Any) -> dict[str, Any]:
    """The one row of an Arrow table as plain values."""
    row = zip(table.schema.names, table.schema.types, table.to_pylist()[0].values(), strict=True)
    return {name: _plain(value, kind) for name, kind, value in row if value is not None}


def _plain(value: Any, kind: Any) -> Any:
    """Arrow gives every struct the fields of all structs, null where one has none: they are left
    out. `datasets` keeps values of mixed kinds as JSON: they are read, their nulls kept."""
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        present = (field for field in kind if value[field.name] is not None)
        return {field.name: _plain(value[field.name], field.type) for field in present}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def _read_json(paths: Sequence[str]) -> list[tuple[str, Any]]:
    records = []
    for path in paths:
        try:
            content = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not JSON: {error}; JSON lines are named .jsonl") from error
        if not isinstance(content, list):
            raise DataError(f"{path}: a .json file must hold one list of records")
        records += [(f"{path}: record {i}", record) for i, record in enumerate(content)]
    return records


def _read_tables(kind: str, paths: Sequence[str]) -> Any:
    import datasets

    try:
        if kind == "parquet":
            return datasets.Dataset.from_parquet(list(paths))
        return datasets.concatenate_datasets([datasets.Dataset.from_file(p) for p in paths])
    except Exception as error:  # pyarrow's and datasets' many kinds
        raise DataError(f"{paths[0]}: not a readable {kind} file: {_root_cause(error)}") from error


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]


def _open_folder(path: str, spec: SourceSpec, root: str) -> Source:
    import datasets

    folder = Path(path)
    if (folder / "dataset_dict.json").exists():
        found = datasets.load_from_disk(path)
        if spec.split not in found:
            raise ConfigError(f"{path} has no split {spec.split!r}; it has {', '.join(found)}")
        return TableSource(found[spec.split], f"{path}[{spec.split}]", root)
    if (folder / "state.json").exists():
        return TableSource(datasets.load_from_disk(path), path, root)
    return _hub_source(spec, root)


def _hub_source(spec: SourceSpec, root: str | None) -> Source:
    import datasets

    try:
        dataset = datasets.load_dataset(spec.path, spec.subset, split=spec.split)
    except Exception as error:  # connection, missing data set, missing split, bad files
        raise ConfigError(
            f"{spec.path}: not a file here, and `datasets` cannot load it: {_root_cause(error)}"
        ) from error
    return TableSource(dataset, f"{spec.path}[{spec.split}]", root or os.getcwd())
