"""TensorBatch: named fields with the same number of rows, each a Tensor or a TensorList. Slices,
chunks and splits are views; picking a list of rows copies Tensor fields."""

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.tensors import tensor_list as lists
from megatron_vlm.data.tensors.tensor_list import (
    Places,
    Target,
    TensorList,
    dtype_name,
    foreign_bytes_error,
    pack,
    unpack,
)
from megatron_vlm.data.tokens.row import COLUMNS, IGNORE, Row
from megatron_vlm.errors import DataError

Value = Tensor | TensorList


@dataclass(frozen=True, eq=False, repr=False)
class TensorBatch:
    """An immutable mapping of field names to Tensors (first dimension: rows) and TensorLists of the
    same length. `len` and iteration are over rows; keys, items and `in` are over fields. `meta`
    holds JSON values for the whole batch, which every operation passes on."""

    fields: Mapping[str, Value]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = dict(self.fields)
        for name, value in fields.items():
            if not isinstance(value, Value) or (isinstance(value, Tensor) and not value.dim()):
                kind = "scalar" if isinstance(value, Tensor) else type(value).__name__
                raise DataError(
                    f"is a {kind}",
                    place="TensorBatch",
                    key=name,
                    remedy="give a Tensor of rows or a TensorList",
                )
            first = next(iter(fields))
            if len(value) != len(fields[first]):
                raise DataError(
                    f"has {len(value)} rows but {first} has {len(fields[first])}",
                    place="TensorBatch",
                    key=name,
                    remedy="give an empty tensor of a TensorList for an absent row",
                )
        object.__setattr__(self, "fields", MappingProxyType(fields))
        object.__setattr__(self, "meta", {key: _json(key, item) for key, item in self.meta.items()})

    def __len__(self) -> int:
        return next((len(value) for value in self.fields.values()), 0)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[row] for row in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def keys(self) -> KeysView[str]:
        return self.fields.keys()

    def items(self) -> ItemsView[str, Value]:
        return self.fields.items()

    @overload
    def __getitem__(self, index: str) -> Value: ...
    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: Places) -> "TensorBatch": ...
    def __getitem__(self, index: str | int | Places) -> "Value | dict[str, Tensor] | TensorBatch":
        """Return a field for a str, a row (field -> Tensor) for an int, else a batch of rows."""
        if isinstance(index, str):
            return self.fields[index]
        if isinstance(index, int | np.integer):
            place = range(len(self))[index]
            return {name: value[place] for name, value in self.items()}
        places = lists.row_places(index, len(self))
        return self._map(lambda value: _take(value, places))

    def __eq__(self, other: object) -> bool:
        """Compare fields, in any order, and meta. Fields are equal as TensorLists are."""
        if not isinstance(other, TensorBatch):
            return NotImplemented
        if self.keys() != other.keys() or self.meta != other.meta:
            return False
        return all(lists.same_values(value, other[name]) for name, value in self.items())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_kind(value)}" for name, value in self.items())
        return f"TensorBatch({len(self)} rows, {fields or 'no fields'}, meta: {list(self.meta)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorBatch.from_bytes, (self.to_bytes(),)

    @property
    def device(self) -> torch.device | None:
        """The device that all fields share; None without fields or rows."""
        return lists.common_device(
            (f"{name}" + f"[{place}]" * isinstance(value, TensorList), part)
            for name, value in self.items()
            for place, part in enumerate([value] if isinstance(value, Tensor) else value)
        )

    @staticmethod
    def cat(batches: Sequence["TensorBatch"]) -> "TensorBatch":
        """Return all rows, in order. Fields, kinds, dtypes, shapes of a row and meta must agree."""
        if not batches:
            raise DataError(
                "would have no fields",
                place="cat",
                key="batches",
                found=[],
                remedy="give at least 1",
            )
        first, *others = batches
        for place, other in enumerate(others, start=1):
            _check_alike(first, other, place)
        if not others:
            return first
        fields = {name: _cat(name, [batch[name] for batch in batches]) for name in first.fields}
        return TensorBatch(fields, first.meta)

    chunk = lists.chunk_rows
    split = lists.split_rows
    repeat = lists.repeat_rows
    repeat_interleave = lists.repeat_rows_interleave

    def to(self, target: Target, non_blocking: bool = False) -> "TensorBatch":
        """Move all fields to a device. As in nn.Module.to, a dtype is for floats alone."""

        def moved(value: Value) -> Value:
            floats = value.dtype is not None and value.dtype.is_floating_point
            stays = isinstance(target, torch.dtype) and not floats
            return value if stays else value.to(target, non_blocking=non_blocking)

        return self._map(moved)

    def pin_memory(self) -> "TensorBatch":
        return self._map(lambda value: value.pin_memory())

    def select(self, names: Iterable[str]) -> "TensorBatch":
        """Return a batch of these fields only, in this order."""
        names = list(names)
        for name in names:
            if name not in self:
                raise DataError(
                    f"is not among the fields: {', '.join(self.keys()) or 'there are none'}",
                    place="select",
                    key=name,
                )
        return TensorBatch({name: self[name] for name in names}, self.meta)

    def with_fields(self, **fields: Value) -> "TensorBatch":
        """Add or replace fields."""
        return TensorBatch({**self.fields, **fields}, self.meta)

    def without(self, *names: str) -> "TensorBatch":
        dropped = self.select(names)
        return self.select(name for name in self.keys() if name not in dropped)

    def to_bytes(self) -> bytes:
        """Return header and values, for from_bytes; values are detached and copied to the host."""
        fields = {
            name: (False, [value]) if isinstance(value, Tensor) else (True, value.rows)
            for name, value in self.items()
        }
        return pack(fields, self.meta)

    @staticmethod
    def from_bytes(buffer: bytes | bytearray | memoryview) -> "TensorBatch":
        """Read the batch that to_bytes wrote. Its tensors are views of a writable buffer, which
        they keep alive. If the buffer is read-only (bytes), they are views of a single copy."""
        fields, meta = unpack(buffer)
        try:
            values = {
                name: TensorList(rows) if is_list else rows[0]
                for name, (is_list, rows) in fields.items()
            }
            return TensorBatch(values, meta)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise foreign_bytes_error(buffer, error) from error

    def _map(self, change: Callable[[Value], Value]) -> "TensorBatch":
        return TensorBatch({name: change(value) for name, value in self.items()}, self.meta)


def _take(value: Value, places: Sequence[int]) -> Value:
    if isinstance(value, TensorList):
        return value[places]
    if isinstance(places, range) and places.step > 0:  # torch has no backward views
        return value[places.start : places.stop : places.step]
    return value[torch.tensor(places, dtype=torch.long, device=value.device)]


def _kind(value: Value) -> str:
    if isinstance(value, TensorList):  # TensorList.cat compares its rows
        return "TensorList"
    shape = ", ".join(["rows", *map(str, value.shape[1:])])
    return f"{dtype_name(value.dtype)} [{shape}] on {value.device}"


def _check_alike(first: TensorBatch, other: TensorBatch, place: int) -> None:
    one, two = (
        {("", name): _kind(value) for name, value in batch.items()}
        | {("meta.", key): json.dumps(value, sort_keys=True) for key, value in batch.meta.items()}
        for batch in (first, other)
    )
    for entry in one | two:
        if one.get(entry) != two.get(entry):
            raise DataError(
                f"is {one.get(entry, 'absent')} in batch 0 but {two.get(entry, 'absent')} in batch "
                f"{place}",
                place="cat",
                key="".join(entry),
                remedy="make them alike (with_fields, without, dataclasses.replace(batch, "
                "meta=...))",
            )


def _cat(name: str, values: Sequence[Value]) -> Value:
    tensors = [value for value in values if isinstance(value, Tensor)]
    try:
        return torch.cat(tensors) if tensors else TensorList.cat(values)  # type: ignore[arg-type]
    except DataError as error:
        raise error.within(f"cat: {name}") from None


def _json(key: str, item: Any) -> Any:
    """Return a copy of the value, which JSON must not change (a tuple, a number as a key)."""
    try:
        copy = json.loads(json.dumps({key: item}))
    except (TypeError, ValueError):
        copy = None
    if copy != {key: item}:
        raise DataError(
            f": JSON cannot represent this {type(item).__name__}",
            key=f"meta.{key}",
            found=item,
            remedy="use lists, dicts with str keys, str, bool, None and finite numbers",
        )
    return copy[key]


# Field of the batch: field of the row, next to COLUMNS. The first two are required.
_FIELDS = {
    "ids": "ids_S",
    "labels": "labels_S",
    "pixel_values": "pixel_values_PC",
    "image_grid_thw": "image_grid_I3",
    "pixel_values_videos": "pixel_values_videos_PC",
    "video_grid_thw": "video_grid_I3",
    "targets": "targets",
}
PIXEL_FIELDS = ("pixel_values", "pixel_values_videos")
MASK = "response_mask"  # in place of labels: true for the supervised tokens
VALUES = ("advantages", "old_log_probs", "ref_log_probs")  # values that our losses read
_NEEDED = ("ids", "labels")


def row_fields() -> tuple[str, ...]:
    """Return the fields of a batch that are of rows, without values that a loss names."""
    return (*_FIELDS, MASK, *COLUMNS)


def batch_of(rows: Sequence[Row]) -> TensorBatch:
    """Return a batch with a TensorList for each field, which is empty where a row lacks it."""
    columns = {name: [getattr(row, field) for row in rows] for name, field in _FIELDS.items()}
    columns |= {name: [row.given(name) for row in rows] for name in COLUMNS}
    named = dict.fromkeys(name for row in rows for name in row.values_S)
    for name in (name for name in named if name not in COLUMNS or COLUMNS[name].field):
        if name in columns or name == MASK:
            raise DataError(
                "is another field of a batch already",
                place="values_S",
                key=name,
                remedy="choose another name",
            )
        columns[name] = [row.values_S.get(name) for row in rows]
    fields = {
        name: TensorList([torch.empty(0) if value is None else value for value in values])
        for name, values in columns.items()
        if name in _NEEDED or any(value is not None for value in values)
    }
    return TensorBatch(fields)


def rows_of(batch: TensorBatch, value_names: Sequence[str] = VALUES) -> list[Row]:
    """Return the rows of a batch, with the named values it has."""
    if "ids" not in batch or not ("labels" in batch or MASK in batch or "targets" in batch):
        missing, neither = ("ids", "") if "ids" not in batch else ("labels", f", nor is {MASK}")
        raise DataError(
            f"is not among the fields{neither}: {', '.join(batch.keys())}",
            place="the batch",
            key=missing,
        )
    names = [name for name in dict.fromkeys((*COLUMNS, *value_names)) if name in batch]
    return [_row(row, names, place) for place, row in enumerate(batch)]


def _row(row: dict[str, Tensor], names: Sequence[str], place: int) -> Row:
    fields = {
        field: row[name]
        for name, field in _FIELDS.items()
        if name in row and (name in _NEEDED or len(row[name]))
    }
    if "labels_S" not in fields:
        ids_S = row["ids"]
        mask_S = row.get(MASK, torch.zeros_like(ids_S))  # absent if the row has targets alone
        if mask_S.shape != ids_S.shape:
            raise DataError(
                f"has shape {tuple(mask_S.shape)}, and ids has {tuple(ids_S.shape)}",
                place=f"row {place}",
                key=MASK,
                remedy="give both the same shape",
            )
        fields["labels_S"] = torch.where(mask_S.bool(), ids_S, IGNORE)
    # An empty tensor stands for an absent one.
    values_S = {name: row[name] for name in names if len(row[name])}
    own = [name for name in values_S if name in COLUMNS and COLUMNS[name].field]
    fields |= {COLUMNS[name].field: values_S.pop(name) for name in own}
    return Row(**fields, values_S=values_S)  # type: ignore[arg-type]
