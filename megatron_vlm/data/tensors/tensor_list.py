"""TensorList: rows of different shapes. Slices, chunks and splits are views. Between processes a
TensorList travels as bytes after a JSON header: pickling (and copy.deepcopy) copies values to the
host, detached."""

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.errors import DataError

# A flag that the field is a TensorList, and its rows. A Tensor is the only row of its field.
Field = tuple[bool, Sequence[Tensor]]

_MAGIC = b"MVROWS\x00\x01"  # the last byte is the format's version
_PREAMBLE = len(_MAGIC) + 8  # followed by the length of the header
_ALIGN = 64  # fields start on cache lines, where any dtype can be viewed
_NAMES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


def pack(fields: Mapping[str, Field], meta: Mapping[str, Any]) -> bytes:
    """Return header and values as bytes; values are detached and copied to the host."""
    table: dict[str, Any] = {}
    pieces: list[Any] = []
    for name, (is_list, rows) in fields.items():
        table[name] = {
            "list": is_list,
            "dtype": dtype_name(rows[0].dtype) if rows else "uint8",
            "shapes": [list(row.shape) for row in rows],
        }
        raw = [_raw(name, row) for row in rows]
        pieces += [*raw, bytes(-sum(map(len, raw)) % _ALIGN)]
    header = json.dumps({"fields": table, "meta": meta}).encode()
    header += b" " * (-(_PREAMBLE + len(header)) % _ALIGN)
    return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *pieces])


def unpack(buffer: bytes | bytearray | memoryview) -> tuple[dict[str, Field], dict[str, Any]]:
    """Read what pack wrote. The tensors are views of a writable buffer, which they keep alive. If
    the buffer is read-only (bytes), they are views of a single copy."""
    view = memoryview(buffer).cast("B")
    end = _PREAMBLE + int.from_bytes(view[len(_MAGIC) : _PREAMBLE], "little")
    fields: dict[str, Field] = {}
    # torch checks every size and shape in the header: no view reaches beyond the end.
    try:
        if view[: len(_MAGIC)] != _MAGIC or end % _ALIGN:
            raise ValueError(f"they do not begin with {_MAGIC!r} and the length of a header")
        header = json.loads(bytes(view[_PREAMBLE:end]))
        flat = _tensor_over(view)
        for name, entry in header["fields"].items():
            dtype, sizes = DTYPES[entry["dtype"]], [math.prod(shape) for shape in entry["shapes"]]
            size = sum(sizes) * dtype.itemsize
            values = flat[end : end + size].view(dtype).split(sizes)
            rows = [part.view(to) for part, to in zip(values, entry["shapes"], strict=True)]
            fields[name] = (entry["list"], rows)
            end += size + -size % _ALIGN
        if end != len(view):
            raise ValueError(f"the header asks for {end}")
        return fields, header["meta"]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise foreign_bytes_error(view, e) from e


def foreign_bytes_error(buffer: bytes | bytearray | memoryview, why: Exception) -> DataError:
    """Return the error for bytes that pack did not write."""
    return DataError(
        f": {memoryview(buffer).nbytes} bytes are not what TensorBatch.to_bytes wrote: {why}",
        place="from_bytes",
        remedy="give all that to_bytes wrote and nothing more",
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch.bfloat16 as bfloat16."""
    return str(dtype).removeprefix("torch.")


def _raw(name: str, row: Tensor) -> np.ndarray:
    """Return the values as bytes on the host, in order, and copied only if need be."""
    if dtype_name(row.dtype) not in DTYPES or row.layout != torch.strided or row.is_meta:
        raise DataError(
            f": {row.layout} {row.dtype} on {row.device} cannot become bytes",
            key=name,
            remedy=f"give dense tensors that hold values, of {', '.join(DTYPES)}",
        )
    host = row.detach().cpu().contiguous().resolve_neg()
    # reshape would not do: a tensor of one value may be contiguous with any stride, which view
    # refuses.
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy()


def _tensor_over(view: memoryview) -> Tensor:
    """Return the buffer's own memory, or a copy if it is read-only or not aligned for floats."""
    flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


Places = slice | Sequence[int] | Tensor  # integers, or a bool for each row
Target = torch.device | torch.dtype | str | int


class HasRows(Protocol):
    """A sequence of rows that can be counted and picked: a TensorList or a TensorBatch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Same = TypeVar("Same", bound=HasRows)


def chunk_rows(self: Same, n: int) -> list[Same]:
    """Split into exactly n parts, as even as possible, the longer ones first."""
    if n < 1:
        raise DataError(
            f"cannot be the number of parts of {len(self)} rows",
            place="chunk",
            key="n",
            found=n,
            remedy="give at least 1",
        )
    return split_rows(self, [len(self) // n + (part < len(self) % n) for part in range(n)])


def split_rows(self: Same, sizes: Sequence[int]) -> list[Same]:
    """Split into consecutive parts of these sizes, which must cover all rows."""
    if sum(sizes) != len(self) or min(sizes, default=0) < 0:
        raise DataError(
            f"add up to {sum(sizes)} but there are {len(self)} rows",
            place="split",
            key="sizes",
            found=list(sizes),
            remedy="give sizes of at least 0 that cover them",
        )
    return [self[start:end] for start, end in pairwise([0, *accumulate(sizes)])]


def repeat_rows(self: Same, n: int) -> Same:
    """Repeat all rows n times. Rows of a TensorList share their memory with their repetitions."""
    if n < 0:
        raise DataError(
            f"cannot be the number of copies of {len(self)} rows",
            place="repeat",
            key="n",
            found=n,
            remedy="give at least 0",
        )
    return self[[*range(len(self))] * n]


def repeat_rows_interleave(self: Same, counts: int | Sequence[int] | Tensor) -> Same:
    """Repeat each row `counts` times, or as its own count says, next to each other."""
    counts = [counts] * len(self) if isinstance(counts, int) else counts
    nums = [operator.index(count) for count in counts]
    if len(nums) != len(self) or min(nums, default=0) < 0:
        raise DataError(
            f"has {len(nums)} entries, the smallest {min(nums, default=0)}, for {len(self)} rows",
            place="repeat_interleave",
            key="counts",
            remedy="give one number, or one of at least 0 for each row",
        )
    return self[[row for row, count in enumerate(nums) for _ in range(count)]]


@dataclass(frozen=True, eq=False, repr=False)
class TensorList:
    """Tensors of one dtype and rank, one for each row. An empty tensor stands for an absent row: it
    may have any rank, and takes the dtype and the device of the rows that are not empty."""

    rows: Sequence[Tensor]

    def __post_init__(self) -> None:
        tensors, rows = tuple(self.rows), []
        for place, row in enumerate(tensors):
            if not isinstance(row, Tensor):
                kind = type(row).__name__
                raise DataError(
                    f"is a {kind}",
                    place="TensorList",
                    key=f"rows[{place}]",
                    remedy="give an empty tensor for an absent row",
                )
        lead = next((place for place, row in enumerate(tensors) if row.numel()), 0)
        for place, row in enumerate(tensors):
            first = tensors[lead]
            if row.numel() and (row.dtype, row.dim()) != (first.dtype, first.dim()):
                raise DataError(
                    f"is {row.dtype} of rank {row.dim()} but rows[{lead}] is {first.dtype} of rank "
                    f"{first.dim()}",
                    place="TensorList",
                    key=f"rows[{place}]",
                    remedy="give one dtype and one rank",
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
        return TensorList([self.rows[place] for place in row_places(index, len(self))])

    def __eq__(self, other: object) -> bool:
        """Compare dtypes, shapes and values, on any devices; NaN equals NaN."""
        if not isinstance(other, TensorList):
            return NotImplemented
        return len(self) == len(other) and all(map(same_values, self.rows, other.rows))

    def __repr__(self) -> str:
        shapes = " ".join(str(list(shape)) for shape in self.shapes[:4])
        return f"TensorList({len(self)} rows, {self.dtype} {shapes}{' ...' * (len(self) > 4)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_list, (pack({"rows": (True, self.rows)}, {}),)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.rows[0].dtype if self.rows else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row.shape) for row in self.rows)

    @property
    def device(self) -> torch.device | None:
        """The device that all rows share; None without rows."""
        return common_device((f"rows[{place}]", row) for place, row in enumerate(self.rows))

    @staticmethod
    def cat(lists: Sequence["TensorList"]) -> "TensorList":
        return TensorList([row for rows in lists for row in rows])

    chunk = chunk_rows
    split = split_rows
    repeat = repeat_rows
    repeat_interleave = repeat_rows_interleave

    def to(self, target: Target, non_blocking: bool = False) -> "TensorList":
        return self._map(lambda row: row.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> "TensorList":
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "TensorList":
        # A repeated row is changed once, so that it does not take its memory n times on a device.
        changed = {key: change(row) for key, row in {id(row): row for row in self.rows}.items()}
        return TensorList([changed[id(row)] for row in self.rows])


def row_places(index: Places, length: int) -> Sequence[int]:
    """Return the rows as numbers from 0: a range for a slice, otherwise a list."""
    if isinstance(index, slice):
        return range(length)[index]
    table = torch.as_tensor(index)
    if table.dtype == torch.bool and table.shape == (length,):
        table = table.nonzero().flatten()
    if table.dim() != 1 or (table.numel() and dtype_name(table.dtype)[:3] not in ("int", "uin")):
        raise DataError(
            f"has {table.dtype} and shape {list(table.shape)} for {length} rows",
            key="index",
            remedy="give an int, a slice, a list of integers, or one bool for each row",
        )
    return [range(length)[int(place)] for place in table.tolist()]


def common_device(named: Iterable[tuple[str, Tensor]]) -> torch.device | None:
    first: tuple[str, torch.device] | None = None
    for name, tensor in named:
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise DataError(
                f"is on {tensor.device} but {first[0]} is on {first[1]}",
                key=name,
                remedy="bring them together with to(device)",
            )
    return first[1] if first else None


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values have one dtype, one shape and equal numbers; NaN equals NaN."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    other = other.to(one.device)
    # torch.equal would not do: it supports neither fp8 nor a NaN that equals another NaN.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _read_list(buffer: bytes) -> TensorList:
    fields, _ = unpack(buffer)
    return TensorList(fields["rows"][1])
