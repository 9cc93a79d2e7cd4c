"""Rows of Arrow tables, which Parquet, Arrow and `datasets` give, as plain values.

Arrow trusts what a file says of its own offsets and lengths: a single flipped bit makes a reader
look outside its memory and die. So a row is checked before it is read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import Outside


class TableSource:
    """A table of Hugging Face `datasets`: Parquet, Arrow, save_to_disk, or from the Hub."""

    def __init__(self, dataset: Any, name: str, root: str):
        with _named(name, "the schema is damaged"):
            # Arrow's own values: `datasets` would decode images, and without our limits.
            self.dataset = dataset.with_format("arrow")
        self.name, self.root = name, root
        files = [each["filename"] for each in dataset.cache_files]
        self.sizes = {path: os.path.getsize(path) for path in files}

    @property
    def digest(self) -> str:
        return str(self.dataset._fingerprint)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        where = self.where(index)
        self._check_sizes()
        with _named(where, "the record is damaged"):
            table = self.dataset[int(index)]
        return table_row(table, where)

    def _check_sizes(self) -> None:
        """The files are mapped: whoever reads past the end of one that has shrunk is killed."""
        for path, size in self.sizes.items():
            found = os.path.getsize(path) if os.path.exists(path) else 0
            if found < size:
                raise DataError(
                    f"has {found:,} bytes now, and had {size:,} when it was opened",
                    place=path,
                    remedy="leave data files alone while they are read, and start again",
                )

    def where(self, index: int) -> str:
        return f"{self.name}: row {index}"


def table_row(table: Any, where: str) -> dict[str, Any]:
    """The only row of an Arrow table, as plain values."""
    with _named(where, "the record is damaged"):
        for column in table.columns:
            for chunk in column.chunks:
                _check(chunk)
        values = table.to_pylist()[0].values()
        row = zip(table.schema.names, table.schema.types, values, strict=True)
        return {name: _plain(value, kind) for name, kind, value in row if value is not None}


@contextmanager
def _named(where: str, damaged: str) -> Iterator[None]:
    """Errors of Arrow, with the name of what is damaged."""
    with Outside(where, remedy="download the file again, or make it again").border(damaged):
        yield


def _check(array: Any) -> None:
    """Raise ArrowInvalid unless every offset, length and string of the array is sound. A full check
    of a list would go through the values of all rows of its batch: here it is of its own alone."""
    array.validate()
    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        _check(array.storage)
    elif pyarrow.types.is_struct(kind):
        for place in range(kind.num_fields):
            _check(array.field(place))
    elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        for one in (array.slice(place, 1) for place in range(len(array))):
            one.validate()  # its offsets are within the values
            _check(one.flatten())
    else:
        array.validate(full=True)


def _plain(value: Any, kind: Any) -> Any:
    """Arrow gives every struct the fields of all others, as nulls: these are left out. `datasets`
    keeps values of mixed types as JSON: these are parsed, and their nulls kept."""
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return Outside("a column of JSON").parsed(value)
    if pyarrow.types.is_struct(kind):
        present = (field for field in kind if value[field.name] is not None)
        return {field.name: _plain(value[field.name], field.type) for field in present}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value
