"""TensorLists and TensorBatches as bytes: a JSON header, then the values. Pickle is not used."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
