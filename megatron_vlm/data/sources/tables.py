"""Rows of Arrow tables as plain values. The tables come from Parquet, Arrow and `datasets`.

Arrow trusts the offsets and lengths in a file: a single flipped bit makes a reader look outside its
memory and die. So a row is checked before it is read.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.data_sources import HUB, SourceSpec
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import UntrustedFile


class TableSource:
    """A table of Hugging Face `datasets`: Parquet, Arrow, save_to_disk, or from the Hub."""

    def __init__(self, dataset: Any, name: str, root: str):
        with _name_errors(name, "the schema is damaged"):
            # Values stay in Arrow format: `datasets` would decode images without our limits.
            self.dataset = dataset.with_format("arrow")
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
        """Refuse files that have shrunk. They are mapped, and a read past the end of one kills the
        process."""
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
        for column in table.columns:
            for chunk in column.chunks:
                _check(chunk)
        values = table.to_pylist()[0].values()
        row = zip(table.schema.names, table.schema.types, values, strict=True)
        return {name: _plain_value(value, kind) for name, kind, value in row if value is not None}


@contextmanager
def _name_errors(where: str, damaged: str) -> Iterator[None]:
    """Raise Arrow's errors with the name of the damaged file or record."""
    with UntrustedFile(where, remedy="download the file again, or make it again").wrap_errors(
        damaged
    ):
        yield


def _check(array: Any) -> None:
    """Raise ArrowInvalid unless every offset, length and string of the array is sound. A full check
    of a list would go through the values of all rows of its batch. This one covers only the list's
    own values."""
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


def _plain_value(value: Any, kind: Any) -> Any:
    """Convert a value of Arrow to a plain one. Arrow gives every struct the fields of all others,
    as nulls: these are left out. `datasets` keeps values of mixed types as JSON: these are parsed,
    and their nulls kept."""
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return UntrustedFile("a column of JSON").parse(value)
    if pyarrow.types.is_struct(kind):
        present = (field for field in kind if value[field.name] is not None)
        return {field.name: _plain_value(value[field.name], field.type) for field in present}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain_value(item, kind.value_type) for item in value]
    return value


# `datasets` loads data sets by name or by folder.
#
# The README.md of a data set may list the files of the set. It is untrusted like the rest of the
# data: it must not name an address or a file outside its folder.

_README = re.compile(r"\s*---[^\n]*\n(.*?)\n---", re.DOTALL)  # the YAML comes first


def load_by_name(spec: SourceSpec, streaming: bool = False) -> Any:
    """Load a split of a data set on the Hub, or in a folder of files."""
    import datasets

    name = spec.path.removeprefix(HUB)
    folder = name == spec.path and os.path.isdir(name)
    if folder:
        _refuse_addresses(Path(name))
        name = os.path.abspath(name)  # `datasets` has builders of its own, such as json
    elif name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ConfigError(": there is no such file or folder", place=spec.path)
    elif os.path.isdir(name):  # a folder of this name is not meant
        name = f"hf://datasets/{name}"
    which = {"path": name, "name": spec.subset, "revision": spec.revision}
    try:
        builder = datasets.load_dataset_builder(**which)
        _refuse_outside(builder.config.data_files or {}, name, folder)
        # This call resolves the same files once more.
        return datasets.load_dataset(**which, split=spec.split, streaming=streaming)
    except DataError:
        raise
    except Exception as error:  # connection, missing data set, missing split, bad files
        verb = "stream" if streaming else "load"
        raise ConfigError(
            f"is not a file here, and `datasets` cannot {verb} it: {root_cause(error)}",
            place=spec.path,
        ) from error


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


def _refuse_outside(files: Any, name: str, folder: bool) -> None:
    """Refuse files outside the folder; for a data set on the Hub, all files of this machine."""
    root = os.path.abspath(os.path.expanduser(name))
    for path in (str(path) for paths in files.values() for path in paths):
        inside = os.path.normpath(path).startswith(os.path.join(root, "")) if folder else False
        if not inside and (folder or "://" not in path):
            raise DataError(
                f": the README.md names {path} as a data file, which lies outside the folder",
                place=name,
                remedy="move the file into the folder, or give its path as data.train",
            )
