"""Matrices among the tensors of a checkpoint, which Muon orthogonalises one by one, and rectangles
of tensors in the part of a parameter that a rank holds or updates.

The matrices are the weights of linear layers and routers, and both matrices of an adapter. Queries,
keys and values are separate, and so are gate and up, also where a checkpoint stores them together;
a tower's fused queries, keys and values are one. Embeddings, positions, the head and its adapter
are not among them, because their rows belong to tokens; neither are vectors and kernels.

For rectangles every tensor counts as a matrix: its first dimension by the product of the others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS, parts_of_expert
from megatron_vlm.hf.weight_map import Entry

Rectangle = tuple[int, int, int, int]  # row, column, rows, columns

FAR_ROW = 2**40  # more rows than any tensor has


@dataclass(frozen=True)
class RowBlock:
    """Rows of this rank's part of a parameter that are consecutive in one checkpoint tensor."""

    name: str
    start: int  # first row in the part
    rows: int
    row: int  # first row in the tensor
    col: int


class Place(NamedTuple):
    """Place of a rectangle among all tensors."""

    name: str
    row: int
    col: int
    rows: int
    cols: int

    @property
    def num_values(self) -> int:
        return self.rows * self.cols

    def of(self, matrix: Tensor) -> Tensor:
        """Return the values of the rectangle as a view of its whole matrix."""
        return matrix[self.row : self.row + self.rows, self.col : self.col + self.cols]


@dataclass(frozen=True)
class FlatRectangle:
    """Rectangle of a tensor whose values are consecutive in a flat part of a parameter."""

    place: Place
    offset: int  # place of its first value in the flat part

    def view(self, flat: Tensor) -> Tensor:
        """Return the values of the rectangle as a view of the flat part."""
        values = flat[self.offset : self.offset + self.place.num_values]
        return values.view(self.place.rows, self.place.cols)


def blocks_of(entry: Entry, rank: int, ranks: int) -> list[RowBlock]:
    """Return the blocks of rows of this rank's part. The table itself determines them: it loads row
    numbers in place of weights. Rows of padding come out as zero and belong to no block."""
    names = entry.names
    shapes = {tensor.name: tensor.shape for tensor in entry.hf_tensors}
    first_col = dict.fromkeys(names, 0)

    def read(name: str, slices: Sequence[tuple[int, int] | None]) -> Tensor:
        start, end = (slices[0] if slices else None) or (0, shapes[name][0])
        if len(slices) > 1 and (cols := slices[1]):
            first_col[name] = cols[0]
        return (torch.arange(start, end) + 1 + names.index(name) * FAR_ROW)[:, None]

    codes = entry.layout.load(read, names, rank, ranks).flatten()
    breaks = (codes.diff() != 1).nonzero().flatten() + 1
    blocks, start = [], 0
    for run in codes.tensor_split(breaks):
        if code := int(run[0]):
            number, row = divmod(code - 1, FAR_ROW)
            name = names[number]
            blocks.append(RowBlock(name, start, len(run), row, first_col[name]))
        start += len(run)
    return blocks


def rectangles(start: int, end: int, width: int) -> Iterator[Rectangle]:
    """Yield the rectangles of [start, end) of a flattened matrix, at most three."""
    while start < end:
        row, col = divmod(start, width)
        if col or end - start < width:
            rows, cols = 1, min(width - col, end - start)
        else:
            rows, cols = (end - start) // width, width
        yield row, col, rows, cols
        start += rows * cols


def flat_rectangles(
    start: int, length: int, width: int, blocks: Iterable[RowBlock]
) -> list[FlatRectangle]:
    """Return the rectangles in [start, start + length) of a flattened parameter."""
    found = []
    for row, col, rows, cols in rectangles(start, start + length, width):
        for block in blocks:
            first, last = max(row, block.start), min(row + rows, block.start + block.rows)
            if first < last:
                row_of_tensor = block.row + first - block.start
                place = Place(block.name, row_of_tensor, block.col + col, last - first, cols)
                found.append(FlatRectangle(place, first * width + col - start))
    return found


@dataclass(frozen=True)
class Matrix:
    """A matrix of a checkpoint."""

    name: str
    rows: int
    columns: int

    def orthogonalize_flops(self, steps: int) -> int:
        """Return the operations of Newton-Schulz. Each step has two products of the matrix with one
        of its smaller side, and the square of that one."""
        small, large = sorted((self.rows, self.columns))
        return steps * (4 * small * small * large + 2 * small**3)


def is_of_matrices(tensor: TensorSpec) -> bool:
    """Return whether a tensor is a matrix, or consists of experts' matrices."""
    if tensor.part in (Part.embed, Part.head, Part.score) or tensor.is_table:
        return False
    dimensions = 3 if OF_EXPERTS in tensor.name else 2
    return len(tensor.shape) == dimensions and min(tensor.shape[-2:]) > 1


def matrices_of(tensor: TensorSpec, experts: Sequence[int] = ()) -> list[Matrix]:
    """Return the matrices of a tensor. For experts, these are the matrices of some of them."""
    if OF_EXPERTS not in tensor.name:
        return [Matrix(tensor.name, *tensor.shape)]
    parts = parts_of_expert(tensor.name)
    _, rows, columns = tensor.shape
    return [
        Matrix(_name_of(tensor.name, expert, part), rows // len(parts), columns)
        for expert in experts
        for part in parts
    ]


def matrix_blocks(tensor: TensorSpec, blocks: Sequence[RowBlock]) -> Iterator[RowBlock]:
    """Yield the blocks of a tensor's matrices among the blocks of a rank's part of a parameter. A
    row of an experts' tensor is a whole expert, and a matrix row is a row in it."""
    of_tensor = [block for block in blocks if block.name == tensor.name]
    if OF_EXPERTS not in tensor.name:
        yield from of_tensor
        return
    parts, height = parts_of_expert(tensor.name), tensor.shape[1]
    rows = height // len(parts)
    for block in of_tensor:
        for expert in range(block.rows):
            for number, part in enumerate(parts):
                name = _name_of(tensor.name, block.row + expert, part)
                start = (block.start + expert) * height + number * rows
                yield RowBlock(name, start, rows, 0, 0)


def _name_of(name: str, expert: int, part: str) -> str:
    return f"{name}/{expert}/{part}"
