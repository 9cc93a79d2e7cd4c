"""Tensors of a request as arrays of float32 or int64, among them the tokens whose log-probs are
requested at the places of a prompt. That request is dense, or sparse if most cells request nothing;
the result has the same layout.

Shapes: R places of the prompt except the last, J tokens of a place, C listed cells.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.serve.protocol.payloads import RequestError, SparseLogProbs

FLOAT32, INT64 = 1, 2
# Name and byte layout of each DType number of the protocol.
_DTYPES = {
    FLOAT32: ("float32", "<f4"),
    INT64: ("int64", "<i8"),
    3: ("int32", "<i4"),
    4: ("bfloat16", "<u2"),
}
_MAX_DIMENSION = 2**31 - 1


def read_tensor(tensor: Any, where: str) -> np.ndarray:
    """Read a Tensor message as an array with one or two dimensions. A sparse tensor is made dense,
    with zeros; `dense_entries` returns how many entries that takes."""
    sparse, dense = tensor.HasField("sparse_csr"), tensor.HasField("dense")
    if sparse == dense:
        raise RequestError(
            "has both dense values and sparse_csr" if sparse else "has no values",
            key=where,
            allowed="either dense or sparse_csr",
        )
    shape = _shape(tensor, where)
    if sparse:
        return _made_dense(tensor, shape, where)
    values = _numbers(tensor.dense, tensor.dtype, where)
    if not shape:
        return values  # The shape may be omitted if there is one dimension.
    if math.prod(shape) != len(values):
        raise RequestError(
            f"holds {math.prod(shape)} values, and there are {len(values)}",
            key=f"{where}.shape",
            found=shape,
            remedy="give as many as the shape holds",
        )
    return values.reshape(shape)


def dense_entries(tensor: Any, where: str) -> int:
    """Return how many entries a sparse tensor has once it is dense. A dense tensor counts 0, since
    its bytes are already there."""
    return math.prod(_shape(tensor, where)) if tensor.HasField("sparse_csr") else 0


def place(flags: np.ndarray) -> str:
    """Format the index of the first flag that is set."""
    index = np.unravel_index(int(np.argmax(flags)), flags.shape)
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def _shape(tensor: Any, where: str) -> list[int]:
    if len(tensor.shape) > 2:
        raise RequestError(
            f"has {len(tensor.shape)} dimensions, and the maximum is 2",
            key=f"{where}.shape",
            found=list(tensor.shape),
            allowed="one value for each target",
        )
    for dimension in tensor.shape:
        if not 0 <= dimension <= _MAX_DIMENSION:
            raise RequestError(
                f": each dimension must be from 0 to {_MAX_DIMENSION}",
                key=f"{where}.shape",
                found=list(tensor.shape),
                allowed="the sizes of the array",
            )
    return list(tensor.shape)


def _numbers(data: bytes, dtype: int, where: str) -> np.ndarray:
    if dtype not in _DTYPES:
        known = ", ".join(f"{number} ({name})" for number, (name, _) in _DTYPES.items())
        raise RequestError(key=f"{where}.dtype", found=dtype, allowed=f"one of {known}")
    name, layout = _DTYPES[dtype]
    values = _array(data, layout, name, where)
    if name == "bfloat16":  # the upper half of a float32
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32 if name == "float32" else np.int64)


def _array(data: bytes, layout: str, name: str, where: str) -> np.ndarray:
    size = np.dtype(layout).itemsize
    if len(data) % size:
        raise RequestError(
            f"has {len(data)} bytes, which is not a multiple of the {size} of {name}",
            key=where,
            remedy="send whole values",
        )
    return np.frombuffer(data, layout)


def _made_dense(tensor: Any, shape: Sequence[int], where: str) -> np.ndarray:
    csr = tensor.sparse_csr
    if len(shape) != 2:
        raise RequestError(
            ": sparse_csr has 2 dimensions",
            key=f"{where}.shape",
            found=list(shape),
            remedy="give both",
        )
    rows, columns = shape
    values = _numbers(csr.values, tensor.dtype, f"{where}.sparse_csr.values")
    crow = _array(csr.crow_indices, "<i8", "int64", f"{where}.sparse_csr.crow_indices")
    column = _array(csr.col_indices, "<i8", "int64", f"{where}.sparse_csr.col_indices")
    row = check_csr(crow, column, len(values), (rows, columns), f"{where}.sparse_csr.")
    dense = np.zeros((rows, columns), values.dtype)
    dense[row, column] = values
    return dense


def check_csr(
    crow: np.ndarray, column: np.ndarray, values: int, shape: tuple[int, int], fields: str
) -> np.ndarray:
    """Return the row of each value. Indices that do not fit the shape are refused. `fields` is the
    common beginning of both field names."""
    rows, columns = shape
    _check_rows(crow, rows, values, f"{fields}crow_indices")
    row = np.repeat(np.arange(rows), np.diff(crow))
    _check_columns(column, row, columns, f"{fields}col_indices")
    return row


def _check_rows(crow: np.ndarray, rows: int, values: int, where: str) -> None:
    if len(crow) != rows + 1:
        raise RequestError(
            f"has {len(crow)} numbers for {rows} rows",
            key=where,
            allowed="one more than there are rows",
        )
    if crow[0] != 0 or crow[-1] != values:
        raise RequestError(
            f"goes from {crow[0]} to {crow[-1]}, and there are {values} values",
            key=where,
            remedy=f"begin with 0 and end with {values}",
        )
    # Differences are not used because they may exceed int64.
    falls = crow[1:] < crow[:-1]
    if falls.any():
        at = int(np.argmax(falls))
        raise RequestError(
            f"comes after {crow[at]}",
            key=f"{where}[{at + 1}]",
            found=int(crow[at + 1]),
            allowed="numbers that never fall",
        )


def _check_columns(column: np.ndarray, row: np.ndarray, columns: int, where: str) -> None:
    if len(column) != len(row):
        raise RequestError(
            f"has {len(column)} numbers for {len(row)} values",
            key=where,
            allowed="one for each value",
        )
    outside = (column < 0) | (column >= columns)
    if outside.any():
        raise RequestError(
            f": there are {columns} columns",
            key=f"{where}{place(outside)}",
            found=int(column[outside][0]),
            allowed=f"columns from 0 to {columns - 1}",
        )
    unsorted = (row[1:] == row[:-1]) & (column[1:] <= column[:-1])
    if unsorted.any():
        at = int(np.argmax(unsorted))
        raise RequestError(
            f"comes after {column[at]} in row {row[at]}",
            key=f"{where}[{at + 1}]",
            found=int(column[at + 1]),
            allowed="the columns of a row in rising order",
        )


WHERE = "target_prompt_logprobs"
NOTHING = -1  # a cell that requests nothing
# Maximum cells after every place is padded to the largest count. An int64 array of them takes 512
# MiB.
MAX_CELLS = 2**26


@dataclass(frozen=True, eq=False)
class PromptTargets:
    """The requested tokens. For a sparse tensor, `ids_RJ` has the listed cells of each place in
    their order, without the columns in between."""

    ids_RJ: np.ndarray
    shape: tuple[int, int]
    crow: np.ndarray | None = None  # set for a sparse tensor
    column_C: np.ndarray | None = None

    def answer(self, log_probs_RJ: np.ndarray) -> np.ndarray | SparseLogProbs:
        """Return the log-probs of `ids_RJ` in the layout of the request."""
        if self.crow is None or self.column_C is None:
            return log_probs_RJ
        values_C = log_probs_RJ[_listed_cells(self.crow, log_probs_RJ.shape[1])]
        return SparseLogProbs(values_C, self.crow, self.column_C, self.shape)


def read_prompt_targets(fields: Mapping[str, Any], length: int) -> PromptTargets:
    """Read the targets of a prompt with `length` tokens. An error names the field."""
    crow, column = fields.get("sparse_crow_indices"), fields.get("sparse_col_indices")
    if (crow is None) != (column is None):
        raise RequestError(
            "has only one of sparse_crow_indices and sparse_col_indices",
            key=WHERE,
            remedy="give both",
        )
    data = _int_values(fields, "data")
    shape = tuple(_int_values(fields, "shape").tolist())
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise RequestError(
            f": the prompt has {length} tokens",
            key=f"{WHERE}.shape",
            found=list(shape),
            allowed=f"[{length - 1}, K]",
        )
    if crow is not None:
        crow = _int_values(fields, "sparse_crow_indices")
        column_C = _int_values(fields, "sparse_col_indices")
        check_csr(crow, column_C, len(data), shape, f"{WHERE}.sparse_")
        return PromptTargets(_compact(data, crow), shape, crow, column_C)
    if len(data) != shape[0] * shape[1]:
        raise RequestError(
            f"holds {shape[0] * shape[1]} values, and data has {len(data)}",
            key=f"{WHERE}.shape",
            found=list(shape),
            remedy="give as many as the shape holds",
        )
    return PromptTargets(data.reshape(shape), shape)


def _int_values(fields: Mapping[str, Any], name: str) -> np.ndarray:
    try:
        values = np.array(fields[name])
        whole = np.array(values, dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _no_numbers(fields, name) from error
    if whole.ndim != 1 or (whole != values).any():
        raise _no_numbers(fields, name)
    return whole


def _no_numbers(fields: Mapping[str, Any], name: str) -> RequestError:
    return RequestError(
        key=f"{WHERE}.{name}", found=fields.get(name), allowed="a list of whole numbers"
    )


def _compact(data_C: np.ndarray, crow: np.ndarray) -> np.ndarray:
    counts = np.diff(crow)
    width = max(int(counts.max(initial=0)), 1)
    if width * len(counts) > MAX_CELLS:
        raise RequestError(
            f"has up to {width} tokens at one of {len(counts)} places",
            key=WHERE,
            remedy="send prompts with many tokens at a place by themselves",
        )
    ids_RJ = np.full((len(counts), width), NOTHING)
    ids_RJ[_listed_cells(crow, width)] = data_C
    return ids_RJ


def _listed_cells(crow: np.ndarray, max_cells: int) -> np.ndarray:
    """Return which cells of the compact array are listed, row by row in their order."""
    return np.arange(max_cells) < np.diff(crow)[:, None]
