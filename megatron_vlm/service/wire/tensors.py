"""Tensors of a request as arrays: float32 or int64."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_vlm.service.wire.values import RequestError

FLOAT32, INT64 = 1, 2
# By the number of the protocol's DType: what it is called, and how its bytes are read.
_DTYPES = {
    FLOAT32: ("float32", "<f4"),
    INT64: ("int64", "<i8"),
    3: ("int32", "<i4"),
    4: ("bfloat16", "<u2"),
}
_MOST_DIMENSION = 2**31 - 1


def read_tensor(tensor: Any, where: str) -> np.ndarray:
    """The array that a Tensor message is: one dimension or two. A sparse one is made dense, with
    zeros; see `dense_entries` for what that takes."""
    sparse, dense = tensor.HasField("sparse_csr"), tensor.HasField("dense")
    if sparse == dense:
        raise RequestError(
            f"{where} has {'both dense values and sparse_csr' if sparse else 'no values'}; give "
            "either dense or sparse_csr"
        )
    shape = _shape(tensor, where)
    if sparse:
        return _made_dense(tensor, shape, where)
    values = _numbers(tensor.dense, tensor.dtype, where)
    if not shape:
        return values  # the shape may be left out where there is one dimension
    if math.prod(shape) != len(values):
        raise RequestError(
            f"{where}: {len(values)} values and shape {shape}, which holds {math.prod(shape)}; "
            "give as many as the shape has"
        )
    return values.reshape(shape)


def dense_entries(tensor: Any, where: str) -> int:
    """How many entries a sparse tensor has once it is dense; 0 of a dense one, whose bytes are
    already there."""
    return math.prod(_shape(tensor, where)) if tensor.HasField("sparse_csr") else 0


def place(flags: np.ndarray) -> str:
    """Where the first of them is, as an index is written."""
    index = np.unravel_index(int(np.argmax(flags)), flags.shape)
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def _shape(tensor: Any, where: str) -> list[int]:
    if len(tensor.shape) > 2:
        raise RequestError(
            f"{where}.shape has {len(tensor.shape)} dimensions and at most 2 are taken; give one "
            "value for each target"
        )
    for dimension in tensor.shape:
        if not 0 <= dimension <= _MOST_DIMENSION:
            raise RequestError(
                f"{where}.shape is {list(tensor.shape)}, and each dimension must be from 0 to "
                f"{_MOST_DIMENSION}; give the sizes of the array"
            )
    return list(tensor.shape)


def _numbers(data: bytes, dtype: int, where: str) -> np.ndarray:
    if dtype not in _DTYPES:
        known = ", ".join(f"{number} ({name})" for number, (name, _) in _DTYPES.items())
        raise RequestError(f"{where}.dtype is {dtype}, which is none of {known}; give one of them")
    name, layout = _DTYPES[dtype]
    values = _array(data, layout, f"{where}, of {name}")
    if name == "bfloat16":  # the upper half of a float32
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32 if name == "float32" else np.int64)


def _array(data: bytes, layout: str, where: str) -> np.ndarray:
    size = np.dtype(layout).itemsize
    if len(data) % size:
        raise RequestError(
            f"{where}: {len(data)} bytes, which are no multiple of the {size} of a value; send "
            "whole values"
        )
    return np.frombuffer(data, layout)


def _made_dense(tensor: Any, shape: Sequence[int], where: str) -> np.ndarray:
    csr = tensor.sparse_csr
    if len(shape) != 2:
        raise RequestError(
            f"{where} is sparse_csr with shape {shape}, and sparse tensors have 2 dimensions; give "
            "both"
        )
    rows, columns = shape
    values = _numbers(csr.values, tensor.dtype, f"{where}.sparse_csr.values")
    crow = _array(csr.crow_indices, "<i8", f"{where}.sparse_csr.crow_indices")
    column = _array(csr.col_indices, "<i8", f"{where}.sparse_csr.col_indices")
    row = check_csr(crow, column, len(values), (rows, columns), f"{where}.sparse_csr.")
    found = np.zeros((rows, columns), values.dtype)
    found[row, column] = values
    return found


def check_csr(
    crow: np.ndarray,
    column: np.ndarray,
    values: int,
    shape: tuple[int, int],
    fields: str,
) -> np.ndarray:
    """The row of each value; refused where the indices do not fit the shape. `fields` is how the
    names of both begin."""
    rows, columns = shape
    _check_rows(crow, rows, values, f"{fields}crow_indices")
    row = np.repeat(np.arange(rows), np.diff(crow))
    _check_columns(column, row, columns, f"{fields}col_indices")
    return row


def _check_rows(crow: np.ndarray, rows: int, values: int, where: str) -> None:
    if len(crow) != rows + 1:
        raise RequestError(
            f"{where}: {len(crow)} numbers for {rows} rows; give one more than there are rows"
        )
    if crow[0] != 0 or crow[-1] != values:
        raise RequestError(
            f"{where} goes from {crow[0]} to {crow[-1]}, and there are {values} values; let it "
            f"begin with 0 and end with {values}"
        )
    # Not by differences, which may be beyond int64.
    falls = crow[1:] < crow[:-1]
    if falls.any():
        at = int(np.argmax(falls))
        raise RequestError(
            f"{where} falls from {crow[at]} to {crow[at + 1]} at [{at + 1}]; let it never fall"
        )


def _check_columns(column: np.ndarray, row: np.ndarray, columns: int, where: str) -> None:
    if len(column) != len(row):
        raise RequestError(
            f"{where}: {len(column)} numbers for {len(row)} values; give one for each value"
        )
    outside = (column < 0) | (column >= columns)
    if outside.any():
        raise RequestError(
            f"{where}{place(outside)} is {column[outside][0]}, and there are {columns} columns; "
            f"give columns from 0 to {columns - 1}"
        )
    unsorted = (row[1:] == row[:-1]) & (column[1:] <= column[:-1])
    if unsorted.any():
        at = int(np.argmax(unsorted))
        raise RequestError(
            f"{where}[{at + 1}] is {column[at + 1]} after {column[at]}, in row {row[at]}; "
            "let the columns of a row rise"
        )
