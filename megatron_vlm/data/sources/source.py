"""Sources of raw records: the kinds of files, and a small class for each way of reading with random
access. Streams, which have none, are in `stream.py`."""

import codecs
import contextlib
import hashlib
import itertools
import json
import os
import tarfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megatron_vlm.config.data_sources import HUB, SourceSpec
from megatron_vlm.data.sources import arrow_tables, text_files
from megatron_vlm.data.sources.columns import (
    FieldNames,
    check_columns_exist,
    parse_cells,
    read_dataset_info,
)
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import real_path

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")


class TarSource:
    """WebDataset shards with random access. `datasets` would first copy them into Arrow, which
    refuses JSON members whose fields differ from sample to sample."""

    def __init__(self, paths: Sequence[str], root: str):
        self.paths, self.root = list(paths), root
        self.name = text_files.name_of_files(paths)
        self.samples: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
        for shard, path in enumerate(self.paths):
            self.samples += _scan_tar(shard, path)

    @cached_property
    def digest(self) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            hasher.update(text_files.file_digest(path).encode())
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return join_members(self.members(index), self.where(index))

    def members(self, index: int) -> dict[str, bytes]:
        """Return the content of each member of a sample, by the end of its name."""
        shard, _, members = self.samples[index]
        text_files.check_size(sum(size for _, size in members.values()), self.where(index))
        with open(self.paths[shard], "rb") as file:
            values = {}
            for field, (offset, size) in members.items():
                file.seek(offset)
                values[field] = file.read(size)
        return values

    def where(self, index: int) -> str:
        shard, key, _ = self.samples[index]
        return f"{self.paths[shard]}: {key}"


def _scan_tar(shard: int, path: str) -> list[tuple[int, str, dict[str, tuple[int, int]]]]:
    """Return the samples of a shard: adjacent members with the same name up to the first dot."""
    samples: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            total = os.path.getsize(path)
            for member in tar:
                # A size below 0 would lead back to members that have been read.
                if member.size < 0 or member.offset_data > total - member.size:
                    raise tarfile.ReadError(f"{member.name} has a size of {member.size} bytes")
                folder, _, base = member.name.rpartition("/")
                stem, _, field = base.partition(".")
                if not member.isfile() or not field:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not samples or samples[-1][1] != key:
                    samples.append((shard, key, {}))
                if member.issparse():  # its size is not that of its content
                    raise tarfile.ReadError(f"{member.name} is stored with holes")
                samples[-1][2][field.lower()] = (member.offset_data, member.size)
            if tar.offset > total:
                raise tarfile.ReadError("unexpected end of data")
    except Exception as error:  # tarfile raises many kinds
        raise DataError(f"is not a readable, uncompressed tar file: {error}", place=path) from error
    return samples


def join_members(values: dict[str, Any], where: str) -> Any:
    """Join a sample's members: the JSON with its pictures, or a picture and its caption."""
    pictures = [values[field] for field in sorted(values) if field.split(".")[-1] in _PICTURES]
    record, text = values.get("json"), values.get("txt")
    if record is not None:
        if isinstance(record, str | bytes):
            record = text_files.parse_json(record, f"{where}.json", "JSON")
        if isinstance(record, dict) and pictures:
            record = {key: value for key, value in record.items() if key != "image"}
            record["images"] = pictures
        return record
    if text is not None and pictures:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return {"images": pictures, "text": text.strip()}
    raise DataError(
        f"has {sorted(values)}, and a sample needs .json, or a picture and .txt", place=where
    )


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
    `roles` come from the configuration, for a spec without its own."""
    spec, names = named_source(spec, columns, roles)
    source = _open_unnamed(spec, spec.image_root or image_root, cache)
    check_columns_exist(names, _keys_of_records(source), source.name)
    has_cells = isinstance(source, TextSource) and bool(source.columns)
    return NamedSource(source, names, has_cells) if names or has_cells else source


def named_source(
    spec: SourceSpec, columns: Mapping[str, str], roles: Mapping[str, Any]
) -> tuple[SourceSpec, FieldNames]:
    """Return the spec of a source and its names of columns, both as dataset_info.json has them."""
    if described := read_dataset_info(spec):
        return described
    own_columns = columns if spec.columns is None else spec.columns
    return spec, FieldNames.from_options(own_columns, roles if spec.roles is None else spec.roles)


def _open_unnamed(spec: SourceSpec, image_root: str | None, cache: Path | None) -> Source:
    root = image_root or default_root(spec)
    if saved := arrow_tables.load_saved(spec):
        return arrow_tables.TableSource(*saved, root)
    found = arrow_tables.find_data(spec)
    if not isinstance(found, list):
        return arrow_tables.TableSource(found, f"{spec.path.removeprefix(HUB)}[{spec.split}]", root)
    if len(suffixes := {text_files.suffix_of(path) for path in found}) > 1:
        raise ConfigError(
            f"matches files of several kinds: {', '.join(sorted(suffixes))}", place=spec.path
        )
    if kind := kind_of_file(found[0]):
        return kind.scan(found, spec.path, root, cache)
    raise ConfigError(
        "has a name that does not tell the format",
        place=spec.path,
        allowed=".jsonl, .json, .csv, .tsv (each also with .gz or .zst), .parquet, .arrow, .tar, a "
        "folder of such files or of save_to_disk, or the name of a Hugging Face data set",
    )


def default_root(spec: SourceSpec) -> str:
    """Return the folder of the images of a spec that names none: where its files are."""
    first = next(iter(arrow_tables.paths_of(spec)), None)
    if first is None:
        return os.getcwd()
    resolved = real_path(first)
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
    if isinstance(source, arrow_tables.TableSource | TextSource) and source.columns:
        yield source.columns
        return
    for index in range(len(source)):
        with contextlib.suppress(DataError):  # it is raised where the record is encoded
            if isinstance(raw := source[index], Mapping):
                yield raw.keys()


@dataclass(frozen=True)
class TextForm:
    """Form of the text of a record: JSON or, with a delimiter, a row of cells."""

    delimiter: str | None = None
    header: Sequence[str] = ()

    def parse(self, text: bytes, where: str) -> Any:
        if self.delimiter is None:
            return text_files.parse_json(text, where)
        return text_files.parse_row(text, self.header, self.delimiter, where)


def _split_texts(
    blocks: Iterable[bytes], name: str, delimiter: str | None
) -> tuple[TextForm, Iterator[tuple[int, int, bytes | None]]]:
    """Split a file, which comes in blocks, into the texts of its records: lines of JSON or, with a
    delimiter, rows. Each has its line, the place of its first byte, and its bytes."""
    if delimiter is None:
        return TextForm(), _lines_with_text(blocks)
    rows = text_files.iter_rows(blocks, name, delimiter)
    return TextForm(delimiter, text_files.parse_header(next(rows, None), name, delimiter)), rows


def _lines_with_text(blocks: Iterable[bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    for number, start, line in text_files.iter_lines(blocks):
        if number == 1 and line and line.startswith(codecs.BOM_UTF8):
            start, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
        if line is None or line.strip():
            yield number, start, line


class TextSource:
    """Records from JSON lines or, with a delimiter, from rows of cells, located by one scan."""

    def __init__(
        self, files: Sequence[str], names: Sequence[str], root: str, delimiter: str | None
    ):
        self.files, self.names, self.root = list(files), list(names), root
        self.name = text_files.name_of_files(names)
        hasher = hashlib.blake2b((delimiter or "").encode(), digest_size=16)
        self.forms: list[TextForm] = []
        scanned = []
        for file, name in zip(self.files, self.names, strict=True):
            form, texts = _split_texts(
                _add_to(hasher, text_files.content_of(file)), name, delimiter
            )
            self.forms.append(form)
            places = array("q")
            for line, start, text in texts:
                # A text that is too large is refused by its size when it is read.
                size = text_files.MAX_RECORD + 1 if text is None else len(text)
                places.extend((line, start, start + size))
            scanned.append(np.frombuffer(places, np.int64).reshape(-1, 3))
        self.digest = hasher.hexdigest()
        self.places = np.concatenate(scanned)  # line, start and end of each record
        self.file_of = np.repeat(range(len(files)), list(map(len, scanned)))

    @property
    def columns(self) -> list[str]:
        """Names of the columns of all files of rows."""
        return list(dict.fromkeys(name for form in self.forms for name in form.header))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        (_, start, end), where = self.places[index].tolist(), self.where(index)
        text_files.check_size(end - start, where)
        number = self.file_of[index]
        with open(self.files[number], "rb") as file:
            file.seek(start)
            return self.forms[number].parse(file.read(end - start), where)

    def where(self, index: int) -> str:
        return f"{self.names[self.file_of[index]]}:{self.places[index, 0]}"


def _add_to(hasher: Any, blocks: Iterable[bytes]) -> Iterator[bytes]:
    for block in blocks:
        hasher.update(block)
        yield block


class ListSource:
    """Records in memory, from .json files that hold a list."""

    def __init__(self, files: Sequence[str], names: Sequence[str], name: str, root: str):
        self.name, self.root = name, root
        self.records: list[tuple[str, Any]] = []  # place and content
        for file, path in zip(files, names, strict=True):
            records = text_files.parse_list(Path(file).read_bytes(), path)
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


Members = Mapping[str, bytes]
# A text among the members of a sample. No name of a member has a space.
TEXT, FORM = "a text", "its form"


def _scan_texts(paths: list[str], name: str, root: str, cache: Path | None) -> Source:
    files = [text_files.unpacked_path(path, cache) for path in paths]
    for file, path in zip(files, paths, strict=True):
        text_files.refuse_utf_16(file, path)
    suffix = text_files.unpacked_suffix(paths[0])
    if suffix == ".json" and all(
        text_files.begins_list(next(text_files.content_of(file), b"")) for file in files
    ):
        return ListSource(files, paths, name, root)
    return TextSource(files, paths, root, text_files.DELIMITERS.get(suffix))


def _iter_texts(path: str) -> Iterator[tuple[str, Members]]:
    """Yield the records of a file without parsing them, because a wrong one may be skipped."""
    blocks, suffix = text_files.content_of(path), text_files.unpacked_suffix(path)
    first = next(blocks, b"")
    if suffix == ".json" and text_files.begins_list(first):
        form = json.dumps(asdict(TextForm())).encode()
        for number, record in enumerate(text_files.parse_list(b"".join((first, *blocks)), path)):
            yield f"{path}: record {number}", {TEXT: json.dumps(record).encode(), FORM: form}
        return
    blocks = itertools.chain((first,), blocks)
    text_form, texts = _split_texts(blocks, path, text_files.DELIMITERS.get(suffix))
    form = json.dumps(asdict(text_form)).encode()
    for line, _, text in texts:
        yield f"{path}:{line}", {} if text is None else {TEXT: text, FORM: form}


def _iter_shard(path: str) -> Iterator[tuple[str, Members]]:
    source = TarSource([path], "")
    for index in range(len(source)):
        yield source.where(index), source.members(index)


def _scan_tables(paths: list[str], name: str, root: str, cache: Path | None) -> Source:
    import datasets

    suffix = text_files.suffix_of(paths[0])
    try:
        if suffix == ".parquet":
            table = datasets.Dataset.from_parquet(list(paths))
        else:
            table = datasets.concatenate_datasets([datasets.Dataset.from_file(p) for p in paths])
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(
            f"is not a readable {suffix[1:]} file: {arrow_tables.root_cause(error)}", place=paths[0]
        ) from error
    return arrow_tables.TableSource(table, name, root)


@dataclass(frozen=True)
class FileKind:
    """Readers of a kind of files: at random after a scan, or one record after the other."""

    scan: Callable[[list[str], str, str, Path | None], Source]
    # The place and the members of each record of a file; None if `datasets` streams the files.
    iterate: Callable[[str], Iterator[tuple[str, Members]]] | None


_TEXTS = FileKind(_scan_texts, _iter_texts)
_TABLES = FileKind(_scan_tables, None)
KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json", *text_files.DELIMITERS), _TEXTS),
    ".tar": FileKind(lambda paths, name, root, cache: TarSource(paths, root), _iter_shard),
    **dict.fromkeys((".parquet", ".arrow"), _TABLES),
}


def kind_of_file(path: str) -> FileKind | None:
    """Return how a file is read, from its suffix. Texts alone may be packed."""
    kind = KINDS.get(text_files.unpacked_suffix(path))
    return kind if kind is _TEXTS or text_files.suffix_of(path) in KINDS else None
