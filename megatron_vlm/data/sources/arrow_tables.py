"""Rows of Arrow tables as plain values. Arrow trusts the offsets and lengths in a file: a single
flipped bit makes a reader look outside its memory and die. So a row is checked before it is
read."""

import glob
import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.data_sources import HUB, SourceSpec
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile, no_file_error, require_file, require_files_in


class TableSource:
    """A table of Hugging Face `datasets`: Parquet, Arrow, save_to_disk, or from the Hub."""

    def __init__(self, dataset: Any, name: str, root: str):
        with _name_errors(name, "the schema is damaged"):
            # Values stay in Arrow format: `datasets` would decode images without our limits.
            self.dataset = dataset.with_format("arrow")
            _refuse_json(dataset.features.arrow_schema, name)
        self.name, self.root = name, root
        files = [each["filename"] for each in dataset.cache_files]
        self.sizes = {path: os.path.getsize(path) for path in files}

    @property
    def digest(self) -> str:
        return str(self.dataset._fingerprint)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        where = self.where(index)
        self._check_sizes()
        with _name_errors(where, "the record is damaged"):
            table = self.dataset[int(index)]
        return table_row(table, where)

    def _check_sizes(self) -> None:
        """Refuse files that have shrunk: a read past the end of a mapped one kills the process."""
        for path, size in self.sizes.items():
            current_size = os.path.getsize(path) if os.path.exists(path) else 0
            if current_size < size:
                raise DataError(
                    f"has {current_size:,} bytes now, and had {size:,} when it was opened",
                    place=path,
                    remedy="leave data files alone while they are read, and start again",
                )

    def where(self, index: int) -> str:
        return f"{self.name}: row {index}"


def table_row(table: Any, where: str) -> dict[str, Any]:
    """Return the only row of an Arrow table, as plain values."""
    with _name_errors(where, "the record is damaged"):
        _refuse_json(table.schema, where)
        for column in table.columns:
            for chunk in column.chunks:
                _check(chunk)
        values = table.to_pylist()[0].values()
        row = zip(table.schema.names, table.schema.types, values, strict=True)
        return {name: _plain_value(value, kind) for name, kind, value in row if value is not None}


def _name_errors(where: str, damaged: str) -> AbstractContextManager[None]:
    """Raise Arrow's errors with the name of the damaged file or record."""
    file = UntrustedFile(where, remedy="download the file again, or make it again")
    return file.wrap_errors(damaged)


def _check(array: Any) -> None:
    """Raise ArrowInvalid unless every offset, length and string of the array is sound. Only a
    list's own values are checked, not the values of all rows of its batch."""
    array.validate()
    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        _check(array.storage)
    elif pyarrow.types.is_struct(kind):
        for place in range(kind.num_fields):
            _check(array.field(place))
    elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        for one in (array.slice(place, 1) for place in range(len(array))):
            one.validate()  # the offsets are within the values
            _check(one.flatten())
    else:
        array.validate(full=True)


def _refuse_json(schema: Any, place: str) -> None:
    """Refuse the feature `Json` of `datasets`, which takes a text that may be JSON for a value."""
    for column in schema:
        if _has_json(column.type):
            raise ConfigError(
                ": the column has the feature Json of `datasets`, which turns texts such as "
                '\'"yes"\' and "[1]" into other values',
                place=place,
                key=column.name,
                remedy="give the JSON lines that the table was made from",
            )


def _has_json(kind: Any) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return isinstance(kind, pyarrow.JsonType) or any(map(_has_json, inner))


def _plain_value(value: Any, kind: Any) -> Any:
    """Convert a value of Arrow to a plain one. Arrow gives every struct the fields of all others,
    as nulls: these are left out."""
    if value is None:
        return None
    if pyarrow.types.is_struct(kind):
        present = (field for field in kind if value[field.name] is not None)
        return {field.name: _plain_value(value[field.name], field.type) for field in present}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain_value(item, kind.value_type) for item in value]
    return value


# `datasets` finds the files of data sets by name or by folder, and reads those that are tables.
# It would change values of JSON and of cells: 007 would become 7.
#
# The README.md of a data set may list the files of the set. It is untrusted like the rest of the
# data: it must not name an address or a file outside its folder.

_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")  # a data set on the Hub
_README = re.compile(r"\s*---[^\n]*\n(.*?)\n---", re.DOTALL)  # the YAML comes first
_TEXTS = ("json", "csv")  # formats that are read here
_NO_OPTIONS = {"name", "version", "data_dir", "data_files", "description"}


def paths_of(spec: SourceSpec) -> list[str]:
    """Return the files or folders that a spec names, in the order of their names."""
    return sorted(glob.glob(os.path.expanduser(spec.path), recursive=True))


def load_saved(spec: SourceSpec) -> tuple[Any, str] | None:
    """Load a split of a folder of save_to_disk, if a spec names one. Return its table and name."""
    path = next(iter(paths_of(spec)), "")
    if not any((Path(path) / name).exists() for name in ("dataset_dict.json", "state.json")):
        return None
    import datasets

    require_files_in(Path(path))
    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(f"cannot be read: {root_cause(error)}", place=path) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset, path
    if spec.split not in dataset:
        raise missing_split(path, spec.split, dataset)
    return dataset[spec.split], f"{path}[{spec.split}]"


def find_data(spec: SourceSpec, streaming: bool = False) -> Any:
    """Return the list of the files of a spec or, if `datasets` reads them, a table."""
    paths = paths_of(spec)
    is_name = _NAME.fullmatch(spec.path) and not Path(spec.path).suffix
    if not (paths or is_name or spec.path.startswith(HUB)):
        raise no_file_error(spec.path)
    if not paths or os.path.isdir(paths[0]):
        for folder in paths:
            require_files_in(Path(folder))
        return _load_by_name(spec, streaming)
    for path in paths:
        require_file(path)
    return paths


def _load_by_name(spec: SourceSpec, streaming: bool) -> Any:
    """Load a split of a data set on the Hub, or in a folder of files. Return its table or, if the
    files are text, the list of their paths. A stream of files on the Hub has their addresses."""
    import datasets

    name = spec.path.removeprefix(HUB)
    folder = os.path.realpath(name) if name == spec.path and os.path.isdir(name) else None
    # `datasets` has builders of its own, such as json.
    if not folder and name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise no_file_error(spec.path)
    try:
        builder = _builder_of_folder(folder, spec) if folder else _builder_of_name(name, spec)
        if builder.name in _TEXTS:
            return _paths(builder.config, spec, streaming)
        if streaming:
            return builder.as_streaming_dataset(split=spec.split)
        builder.download_and_prepare()
        return builder.as_dataset(split=spec.split)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # connection, missing data set, missing split, bad files
        verb = "stream" if streaming else "load"
        raise ConfigError(
            f"is not a file here, and `datasets` cannot {verb} it: {root_cause(error)}",
            place=spec.path,
        ) from error


def _builder_of_folder(folder: str, spec: SourceSpec) -> Any:
    """Return what `datasets` knows about a data set: its format, options and files."""
    import datasets

    _refuse_addresses(Path(folder))
    builder = datasets.load_dataset_builder(folder, spec.subset)
    for path in _files_of(builder):
        if not os.path.normpath(path).startswith(os.path.join(folder, "")):
            raise _outside_error(path, spec)
    return builder


def _builder_of_name(name: str, spec: SourceSpec) -> Any:
    """Return what `datasets` knows about a data set on the Hub, or in its cache if offline."""
    import datasets
    from huggingface_hub import snapshot_download

    # A folder of this name is not meant.
    address = f"hf://datasets/{name}" if os.path.isdir(name) else name
    builder, unreachable = None, None
    try:
        builder = datasets.load_dataset_builder(address, spec.subset, revision=spec.revision)
    except ConnectionError as error:
        unreachable = error
    if builder is None or builder.name == "cache":  # a table that `datasets` made of the files
        which: Any = {"repo_type": "dataset", "revision": spec.revision}
        with suppress(FileNotFoundError):
            path = snapshot_download(name, local_files_only=True, **which)
            return _builder_of_folder(os.path.realpath(str(path)), spec)
    if builder is None:
        assert unreachable is not None
        raise unreachable
    for path in _files_of(builder):
        if "://" not in path:  # on this machine
            raise _outside_error(path, spec)
    return builder


def _files_of(builder: Any) -> list[str]:
    files = builder.config.data_files or {}
    return [str(path) for paths in files.values() for path in paths]


def _paths(config: Any, spec: SourceSpec, streaming: bool) -> list[str]:
    """Return the paths of the files of a split, which are downloaded unless they are streamed."""
    import datasets

    files = {str(split): list(map(str, paths)) for split, paths in config.data_files.items()}
    if spec.split not in files:
        raise missing_split(spec.path, spec.split, files)
    is_tsv = any(".tsv" in os.path.basename(path) for path in files[spec.split])
    usual = type(config)(**({"sep": "\t"} if is_tsv else {}))
    for option in (field.name for field in fields(config) if field.name not in _NO_OPTIONS):
        if getattr(config, option) != getattr(usual, option):
            raise ConfigError(
                ": the README.md sets this option of `datasets`, and files are read without it",
                place=spec.path,
                key=option,
                found=getattr(config, option),
                remedy="convert the files to JSON lines, and give these",
            )
    if not streaming:  # other splits, too: the README.md names them, and may be read offline later
        files = datasets.DownloadManager().download(files)
    return files[spec.split]


def missing_split(place: str, split: str, splits: Iterable[str]) -> ConfigError:
    """Make the error of a split that a data set does not have."""
    return ConfigError(
        ": there is no such split", place=place, key="split", found=split, allowed=tuple(splits)
    )


def root_cause(error: BaseException) -> str:
    """Return the first line of the error that led to this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]


def _refuse_addresses(folder: Path) -> None:
    """Refuse addresses before `datasets` sends requests to them."""
    for path in (folder / "README.md", folder / ".huggingface.yaml"):
        file = UntrustedFile(str(path), remedy="mend it")
        text = file.content().decode(errors="replace") if os.path.lexists(path) else ""
        head = _README.match(text) if path.suffix == ".md" else None
        with file.wrap_errors("its YAML cannot be read"):
            settings = yaml.safe_load(head[1] if head else "" if path.suffix == ".md" else text)
        configs = settings.get("configs") if isinstance(settings, dict) else None
        if address := re.search(r"[\w+.]+://[^'\"\s]*|::", str(configs or "")):
            raise DataError(
                f"names {address[0]} as a data file",
                place=str(path),
                remedy="download it into the folder and name it there",
            )


def _outside_error(path: str, spec: SourceSpec) -> DataError:
    return DataError(
        f": the README.md names {path} as a data file, which lies outside the folder",
        place=spec.path,
        remedy="move the file into the folder, or give its path as data.train",
    )
