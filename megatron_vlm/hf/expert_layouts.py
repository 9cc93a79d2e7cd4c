"""Layouts in which checkpoints store the experts of a layer. The rest of the package knows one
form: the tensors gate_up_proj [experts, 2 * width, hidden] and down_proj [experts, hidden, width],
as in the memory of transformers 5."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.spec import ModelSizes

OF_EXPERTS = ".experts."  # part of the names of the experts' tensors

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"

Span = tuple[int, int] | None
# A function that reads a slice of a checkpoint tensor, from its name and (start, end) for each of
# its first dimensions; None takes the whole dimension.
ReadSlice = Callable[[str, Sequence[Span]], Tensor]
Shape = tuple[int, ...]


class ExpertStorage(Enum):
    """Forms of storage, by the tensors that a file has for a layer."""

    out_in = "two tensors [experts, out, in], as transformers 5 writes them"
    in_out = "two tensors [experts, in, out], as the released checkpoints have them"
    single = "three matrices [out, in] for each expert"

    def stored(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Return the stored tensors that correspond to one of our tensors, in the order of `split`,
        with their shapes. Tensors of other parts of the model are stored unchanged."""
        if OF_EXPERTS not in name or self is ExpertStorage.out_in:
            return {name: shape}
        count, rows, columns = shape
        if self is ExpertStorage.in_out:
            return {name: (count, columns, rows)}
        parts = parts_of_expert(name)
        part_shape = (rows // len(parts), columns)
        return {
            _name_of_expert(name, expert, part): part_shape
            for expert in range(count)
            for part in parts
        }

    def split(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the values of the tensors of `stored`."""
        if OF_EXPERTS not in name or self is ExpertStorage.out_in:
            return [tensor]
        if self is ExpertStorage.in_out:
            return [tensor.transpose(1, 2)]
        return [part for expert in tensor for part in expert.chunk(len(parts_of_expert(name)))]

    def read(self, read: ReadSlice, name: str, spans: Sequence[Span]) -> Tensor:
        """Read some experts of one of our tensors, from the stored tensors that they consist of."""
        if OF_EXPERTS not in name or self is ExpertStorage.out_in:
            return read(name, spans)
        (span,) = spans
        assert span is not None, "a rank says which experts it holds"
        if self is ExpertStorage.in_out:
            return read(name, spans).transpose(1, 2)
        experts = [
            torch.cat(
                [read(_name_of_expert(name, expert, part), ()) for part in parts_of_expert(name)]
            )
            for expert in range(*span)
        ]
        return torch.stack(experts)


def slices_of(spans: Sequence[Span]) -> tuple[slice, ...]:
    """Return the index of a slice of a tensor."""
    return tuple(slice(None) if span is None else slice(*span) for span in spans)


def parts_of_expert(name: str) -> tuple[str, ...]:
    """Return the matrices of each expert that one of our tensors has, one below the other."""
    return ("gate_proj", "up_proj") if name.endswith(_GATE_UP) else (_DOWN,)


def _name_of_expert(name: str, expert: int, part: str) -> str:
    return f"{name.partition(OF_EXPERTS)[0]}{OF_EXPERTS}{expert}.{part}.weight"


def find_form(path: str, present: Mapping[str, Shape], sizes: ModelSizes) -> ExpertStorage:
    """Return the layout of the tensors in a checkpoint. Two forms differ only in their shapes;
    where one matrix of an expert is square, the other one decides."""
    shapes = {name: shape for name, shape in sizes.shapes.items() if OF_EXPERTS in name}
    if any(OF_EXPERTS in name and name.endswith(".weight") for name in present):
        return ExpertStorage.single
    transposed: list[str] = []
    untransposed: list[str] = []
    square: list[str] = []
    for name, shape in shapes.items():
        if present.get(name) == shape:
            (square if shape[1] == shape[2] else untransposed).append(name)
        elif present.get(name) == (shape[0], shape[2], shape[1]):
            transposed.append(name)
    if not transposed or untransposed:  # if both, `check_tensors` lists the differences
        return ExpertStorage.out_in
    if square:
        raise CheckpointError(
            f"is stored as [experts, in, out], but {square[0]} {shapes[square[0]]} is square, and "
            "transformers 5 would read it as [experts, out, in]",
            place=path,
            key=transposed[0],
            remedy="store both as [experts, out, in]",
        )
    return ExpertStorage.in_out
