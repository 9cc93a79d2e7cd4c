"""TensorList: rows of different shapes. TensorBatch: named fields with the same number of rows.

Slices, chunks, splits and everything on a TensorList are views; a list of rows copies Tensor
fields. Both travel between processes as bytes under a JSON header, never as pickled tensors:
pickle (so copy.deepcopy as well) brings their values to the host and detaches them.
"""

import json
import math
import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.errors import DataError

Places = slice | Sequence[int] | Tensor  # which rows: integers, or a bool for each
Target = torch.device | torch.dtype | str | int
Rows = TypeVar("Rows", "TensorList", "TensorBatch")
_MAGIC = b"MVROWS\x00\x01"  # the last byte is the version of the format
_PREAMBLE = len(_MAGIC) + 8  # and the length of the header
_ALIGN = 64  # a field starts on a cache line, where any dtype can be viewed
_NAMES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


def _chunk(self: Rows, n: int) -> list[Rows]:
    """Exactly n parts, as even as they come: the first are longer, the last may be empty."""
    if n < 1:
        raise DataError(f"chunk: {n} parts of {len(self)} rows; give at least 1")
    return _split(self, [len(self) // n + (part < len(self) % n) for part in range(n)])


def _split(self: Rows, sizes: Sequence[int]) -> list[Rows]:
    """Consecutive parts of these sizes, which must cover all rows."""
    if sum(sizes) != len(self) or min(sizes, default=0) < 0:
        raise DataError(
            f"split: sizes {list(sizes)} add up to {sum(sizes)} but there are {len(self)} rows; "
            "give sizes from 0 on that cover them"
        )
    return [self[start:end] for start, end in pairwise([0, *accumulate(sizes)])]


def _repeat(self: Rows, n: int) -> Rows:
    """All rows n times over. Rows of a TensorList share their memory with their repetitions."""
    if n < 0:
        raise DataError(f"repeat: {n} times {len(self)} rows; give at least 0")
    return self[[*range(len(self))] * n]


def _repeat_interleave(self: Rows, counts: int | Sequence[int] | Tensor) -> Rows:
    """Each row `counts` times, or as often as its own count says, its repetitions together."""
    counts = [counts] * len(self) if isinstance(counts, int) else counts
    each = [operator.index(count) for count in counts]
    if len(each) != len(self) or min(each, default=0) < 0:
        raise DataError(
            f"repeat_interleave: {len(each)} counts, the least {min(each, default=0)}, for "
            f"{len(self)} rows; give one number, or one of at least 0 for each row"
        )
    return self[[row for row, count in enumerate(each) for _ in range(count)]]


@dataclass(frozen=True, eq=False, repr=False)
class TensorList:
    """Tensors of one dtype and rank, one a row. An empty tensor stands for an absent row: it may
    have any rank, and takes the dtype and the device of the rows that hold something."""

    rows: Sequence[Tensor]

    def __post_init__(self) -> None:
        given, rows = tuple(self.rows), []
        for place, row in enumerate(given):
            if not isinstance(row, Tensor):
                kind = type(row).__name__
                raise DataError(f"row {place} is a {kind}; an absent row is an empty tensor")
        lead = next((place for place, row in enumerate(given) if row.numel()), 0)
        for place, row in enumerate(given):
            first = given[lead]
            if row.numel() and (row.dtype, row.dim()) != (first.dtype, first.dim()):
                raise DataError(
                    f"row {place} is {row.dtype} of rank {row.dim()} but row {lead} "
                    f"{first.dtype} of rank {first.dim()}; give one dtype and one rank"
                )
            rows.append(row if row.numel() else row.to(first.device, first.dtype))
        object.__setattr__(self, "rows", tuple(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: Places) -> "TensorList": ...
    def __getitem__(self, index: int | Places) -> "Tensor | TensorList":
        if isinstance(index, int | np.integer):
            return self.rows[index]
        return TensorList([self.rows[place] for place in _places(index, len(self))])

    def __eq__(self, other: object) -> bool:
        """Same dtypes, shapes and values, on whatever devices; NaN equals NaN."""
        if not isinstance(other, TensorList):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self.rows, other.rows))

    def __repr__(self) -> str:
        shapes = " ".join(str(list(shape)) for shape in self.shapes[:4])
        return f"TensorList({len(self)} rows, {self.dtype} {shapes}{' ...' * (len(self) > 4)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_rows, (TensorBatch({"rows": self}).to_bytes(),)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.rows[0].dtype if self.rows else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row.shape) for row in self.rows)

    @property
    def device(self) -> torch.device | None:
        """The one device of all rows; None without rows."""
        return _one_device((f"row {place}", row) for place, row in enumerate(self.rows))

    @staticmethod
    def cat(lists: Sequence["TensorList"]) -> "TensorList":
        return TensorList([row for rows in lists for row in rows])

    chunk = _chunk
    split = _split
    repeat = _repeat
    repeat_interleave = _repeat_interleave

    def to(self, target: Target, non_blocking: bool = False) -> "TensorList":
        return self._map(lambda row: row.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> "TensorList":
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "TensorList":
        # A repeated row is changed once: on a device it must not take its memory n times.
        changed = {key: change(row) for key, row in {id(row): row for row in self.rows}.items()}
        return TensorList([changed[id(row)] for row in self.rows])


Value = Tensor | TensorList


@dataclass(frozen=True, eq=False, repr=False)
class TensorBatch:
    """An immutable mapping of field names to Tensors (first dimension: rows) and TensorLists, all
    of one length. Its length and iteration are over rows; keys, items and `in` over fields.
    `meta` holds JSON values for the whole batch, which every operation hands on."""

    fields: Mapping[str, Value]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = dict(self.fields)
        for name, value in fields.items():
            if not isinstance(value, Value) or (isinstance(value, Tensor) and not value.dim()):
                kind = "scalar" if isinstance(value, Tensor) else type(value).__name__
                raise DataError(f"field {name!r} is a {kind}; give a Tensor of rows or TensorList")
            first = next(iter(fields))
            if len(value) != len(fields[first]):
                raise DataError(
                    f"field {name!r} has {len(value)} rows but {first!r} has "
                    f"{len(fields[first])}; an absent row is an empty tensor of a TensorList"
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
        """A field by its name, a row (field -> Tensor) by an int, a batch by anything else."""
        if isinstance(index, str):
            return self.fields[index]
        if isinstance(index, int | np.integer):
            place = range(len(self))[index]
            return {name: value[place] for name, value in self.items()}
        places = _places(index, len(self))
        return self._map(lambda value: _take(value, places))

    def __eq__(self, other: object) -> bool:
        """Same fields in any order, same values as TensorList has it, same meta."""
        if not isinstance(other, TensorBatch):
            return NotImplemented
        if self.keys() != other.keys() or self.meta != other.meta:
            return False
        return all(_same(value, other[name]) for name, value in self.items())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_kind(value)}" for name, value in self.items())
        return f"TensorBatch({len(self)} rows, {fields or 'no fields'}, meta: {list(self.meta)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_batch, (self.to_bytes(),)

    @property
    def device(self) -> torch.device | None:
        """The one device of all fields; None without fields or rows."""
        return _one_device(
            (f"field {name!r}" + f" row {place}" * isinstance(value, TensorList), part)
            for name, value in self.items()
            for place, part in enumerate([value] if isinstance(value, Tensor) else value)
        )

    @staticmethod
    def cat(batches: Sequence["TensorBatch"]) -> "TensorBatch":
        """All rows, in order. Fields, kinds, dtypes, shapes of a row and meta must agree."""
        if not batches:
            raise DataError("cat of 0 batches would have no fields; give at least 1")
        first, *others = batches
        for place, other in enumerate(others, start=1):
            _check_alike(first, other, place)
        if not others:
            return first
        fields = {name: _cat(name, [batch[name] for batch in batches]) for name in first.fields}
        return TensorBatch(fields, first.meta)

    chunk = _chunk
    split = _split
    repeat = _repeat
    repeat_interleave = _repeat_interleave

    def to(self, target: Target, non_blocking: bool = False) -> "TensorBatch":
        """All fields to a device; to a dtype only those of floats, as nn.Module.to has it."""

        def moved(value: Value) -> Value:
            floats = value.dtype is not None and value.dtype.is_floating_point
            stays = isinstance(target, torch.dtype) and not floats
            return value if stays else value.to(target, non_blocking=non_blocking)

        return self._map(moved)

    def pin_memory(self) -> "TensorBatch":
        return self._map(lambda value: value.pin_memory())

    def select(self, names: Iterable[str]) -> "TensorBatch":
        """These fields alone, in this order."""
        names = list(names)
        for name in names:
            if name not in self:
                raise DataError(f"no field {name!r}; there are {', '.join(self.keys()) or 'none'}")
        return TensorBatch({name: self[name] for name in names}, self.meta)

    def with_fields(self, **fields: Value) -> "TensorBatch":
        """Fields added or replaced."""
        return TensorBatch({**self.fields, **fields}, self.meta)

    def without(self, *names: str) -> "TensorBatch":
        gone = self.select(names)
        return self.select(name for name in self.keys() if name not in gone)

    def to_bytes(self) -> bytes:
        """Header and values, for from_bytes; values are detached and come to the host."""
        table: dict[str, Any] = {}
        pieces: list[Any] = []
        for name, value in self.items():
            rows = [value] if isinstance(value, Tensor) else value.rows
            table[name] = {
                "list": isinstance(value, TensorList),
                "dtype": _name(rows[0].dtype) if rows else "uint8",
                "shapes": [list(row.shape) for row in rows],
            }
            raw = [_raw(name, row) for row in rows]
            pieces += [*raw, bytes(-sum(map(len, raw)) % _ALIGN)]
        header = json.dumps({"fields": table, "meta": self.meta}).encode()
        header += b" " * (-(_PREAMBLE + len(header)) % _ALIGN)
        return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *pieces])

    @staticmethod
    def from_bytes(buffer: bytes | bytearray | memoryview) -> "TensorBatch":
        """The batch that to_bytes wrote. Over a writable buffer its tensors are views, which keep
        the buffer alive; over a read-only one (bytes) all are views of one copy."""
        return _read_batch(buffer)

    def _map(self, change: Callable[[Value], Value]) -> "TensorBatch":
        return TensorBatch({name: change(value) for name, value in self.items()}, self.meta)


def _places(index: Places, length: int) -> Sequence[int]:
    """Rows as numbers from 0 on: a range for a slice, else a list."""
    if isinstance(index, slice):
        return range(length)[index]
    table = torch.as_tensor(index)
    if table.dtype == torch.bool and table.shape == (length,):
        table = table.nonzero().flatten()
    if table.dim() != 1 or (table.numel() and _name(table.dtype)[:3] not in ("int", "uin")):
        raise DataError(
            f"an index of {table.dtype} and shape {list(table.shape)} for {length} rows; "
            "give an int, a slice, a list of integers, or one bool for each row"
        )
    return [range(length)[int(place)] for place in table.tolist()]


def _take(value: Value, places: Sequence[int]) -> Value:
    if isinstance(value, TensorList):
        return value[places]
    if isinstance(places, range) and places.step > 0:  # torch has no views that run backwards
        return value[places.start : places.stop : places.step]
    return value[torch.tensor(places, dtype=torch.long, device=value.device)]


def _one_device(named: Iterable[tuple[str, Tensor]]) -> torch.device | None:
    first: tuple[str, torch.device] | None = None
    for name, tensor in named:
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise DataError(
                f"{name} is on {tensor.device} but {first[0]} on {first[1]}; "
                "bring them together with to(device)"
            )
    return first[1] if first else None


def _same(one: Value, other: Value) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    other = other.to(one.device)
    # Not torch.equal: it knows neither fp8 nor a NaN that equals another.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _kind(value: Value) -> str:
    if isinstance(value, TensorList):  # its rows are compared when they are put together
        return "TensorList"
    shape = ", ".join(["rows", *map(str, value.shape[1:])])
    return f"{_name(value.dtype)} [{shape}] on {value.device}"


def _check_alike(first: TensorBatch, other: TensorBatch, place: int) -> None:
    one, two = (
        {f"field {name!r}": _kind(value) for name, value in batch.items()}
        | {f"meta {key!r}": json.dumps(value, sort_keys=True) for key, value in batch.meta.items()}
        for batch in (first, other)
    )
    for what in one | two:
        if one.get(what) != two.get(what):
            raise DataError(
                f"cat: {what} is {one.get(what, 'absent')} in batch 0 but "
                f"{two.get(what, 'absent')} in batch {place}; make them alike "
                "(with_fields, without, dataclasses.replace(batch, meta=...))"
            )


def _cat(name: str, values: Sequence[Value]) -> Value:
    tensors = [value for value in values if isinstance(value, Tensor)]
    try:
        return torch.cat(tensors) if tensors else TensorList.cat(values)  # type: ignore[arg-type]
    except DataError as error:
        raise DataError(f"cat: field {name!r}: {error}") from None


def _json(key: str, item: Any) -> Any:
    """A copy of it, refused where JSON makes it something else: a tuple, a number as a key."""
    try:
        copy = json.loads(json.dumps({key: item}))
    except (TypeError, ValueError):
        copy = None
    if copy != {key: item}:
        raise DataError(
            f"meta {key!r} is {item!r:.60}, which JSON does not give back; use lists, "
            "dicts with str keys, str, bool, None and finite numbers"
        )
    return copy[key]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raw(name: str, row: Tensor) -> np.ndarray:
    """The values as bytes on the host, in order; copied only where they do not lie so."""
    if _name(row.dtype) not in _DTYPES or row.layout != torch.strided or row.is_meta:
        raise DataError(
            f"field {name!r}: no bytes for {row.layout} {row.dtype} on {row.device}; "
            f"give dense tensors that hold values, of {', '.join(_DTYPES)}"
        )
    host = row.detach().cpu().contiguous().resolve_neg()
    # Not reshape: a tensor of one value may be contiguous with any stride, which view refuses.
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy()


def _read_batch(buffer: bytes | bytearray | memoryview) -> TensorBatch:
    view = memoryview(buffer).cast("B")
    end = _PREAMBLE + int.from_bytes(view[len(_MAGIC) : _PREAMBLE], "little")
    fields: dict[str, Value] = {}
    # torch checks every size and shape that the header says: views reach no byte beyond the end.
    try:
        if view[: len(_MAGIC)] != _MAGIC or end % _ALIGN:
            raise ValueError(f"they do not begin with {_MAGIC!r} and the length of a header")
        header = json.loads(bytes(view[_PREAMBLE:end]))
        flat = _over(view)
        for name, said in header["fields"].items():
            dtype, sizes = _DTYPES[said["dtype"]], [math.prod(shape) for shape in said["shapes"]]
            size = sum(sizes) * dtype.itemsize
            values = flat[end : end + size].view(dtype).split(sizes)
            rows = [part.view(to) for part, to in zip(values, said["shapes"], strict=True)]
            fields[name] = TensorList(rows) if said["list"] else rows[0]
            end += size + -size % _ALIGN
        if end != len(view):
            raise ValueError(f"the header asks for {end}")
        return TensorBatch(fields, header["meta"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise DataError(
            f"{len(view)} bytes are not what TensorBatch.to_bytes wrote: {e}; "
            "give from_bytes all of that and nothing more"
        ) from e


def _read_rows(buffer: bytes) -> Value:
    return _read_batch(buffer)["rows"]


def _over(view: memoryview) -> Tensor:
    """The buffer's own memory, or a copy where it is read-only (a tensor is always writable) or
    begins at an address that no float may have."""
    if not view.readonly:
        flat = torch.frombuffer(view, dtype=torch.uint8)
        return flat if flat.data_ptr() % 16 == 0 else flat.clone()
    copy = torch.empty(len(view), dtype=torch.uint8)
    copy.numpy()[:] = np.frombuffer(view, dtype=np.uint8)
    return copy
