"""Matrices among the tensors of a checkpoint: what Muon orthogonalises, one by one.

They are the weights of linear layers and routers, and both matrices of an adapter. Queries, keys
and values are matrices of their own, and so are gate and up, also those of each expert, which some
checkpoints store together. A tower's fused queries, keys and values are one matrix, as in the
checkpoint. Embeddings, positions, the head and its adapter are not among them, because their rows
belong to tokens; neither are vectors, a matrix with a single row or column, and kernels of
convolutions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS, parts_of_expert
from megatron_vlm.hf.rectangles import RowBlock

_POSITIONS = ".pos_embed.weight"


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
    """Return whether a tensor is a matrix, or consists of those of experts."""
    if tensor.part in (Part.embed, Part.head) or tensor.name.endswith(_POSITIONS):
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
    """Yield the blocks of a tensor's matrices among those of a rank's part of a parameter. The rows
    of experts are whole experts, and those of their matrices are rows of these."""
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
