"""How a checkpoint stores the experts of a layer. The rest of the package knows one form: the
tensors gate_up_proj [experts, 2 * width, hidden] and down_proj [experts, hidden, width], as
transformers 5 has them in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.spec import ModelSizes

OF_EXPERTS = ".mlp.experts."  # in the names of their tensors

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"

Span = tuple[int, int] | None
Shape = tuple[int, ...]


class ExpertStorage(Enum):
    """The forms, by what a file has for a layer."""

    out_in = "two tensors [experts, out, in], as transformers 5 writes them"
    in_out = "two tensors [experts, in, out], as the released checkpoints have them"
    single = "three matrices [out, in] for each expert"


@dataclass(frozen=True)
class ExpertLayout:
    """The form of a checkpoint."""

    form: ExpertStorage

    def all_stored(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The tensors that stand for these, with their shapes."""
        found = (self.stored(name, shape) for name, shape in shapes.items())
        return {name: shape for each in found for name, shape in each.items()}

    def stored(self, name: str, shape: Shape) -> dict[str, Shape]:
        """The tensors that stand for one of ours, in the order of `split`, with their shapes.
        Those of other parts of the model stand for themselves."""
        if OF_EXPERTS not in name or self.form is ExpertStorage.out_in:
            return {name: shape}
        count, rows, columns = shape
        if self.form is ExpertStorage.in_out:
            return {name: (count, columns, rows)}
        parts = _parts(name)
        each = (rows // len(parts), columns)
        return {_single(name, expert, part): each for expert in range(count) for part in parts}

    def split(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The values of the tensors of `stored`."""
        if OF_EXPERTS not in name or self.form is ExpertStorage.out_in:
            return [tensor]
        if self.form is ExpertStorage.in_out:
            return [tensor.transpose(1, 2)]
        return [part for expert in tensor for part in expert.chunk(len(_parts(name)))]

    def read(
        self, read: Callable[[str, Sequence[Span]], Tensor], name: str, spans: Sequence[Span]
    ) -> Tensor:
        """Some experts of one of our tensors, by reading only what makes them up. Other tensors
        are read as they are."""
        if OF_EXPERTS not in name or self.form is ExpertStorage.out_in:
            return read(name, spans)
        (span,) = spans
        assert span is not None, "a rank says which experts it holds"
        if self.form is ExpertStorage.in_out:
            return read(name, spans).transpose(1, 2)
        experts = [
            torch.cat([read(_single(name, expert, part), ()) for part in _parts(name)])
            for expert in range(*span)
        ]
        return torch.stack(experts)


def _parts(name: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if name.endswith(_GATE_UP) else (_DOWN,)


def _single(name: str, expert: int, part: str) -> str:
    return f"{name.partition(OF_EXPERTS)[0]}{OF_EXPERTS}{expert}.{part}.weight"


def find_form(path: str, found: Mapping[str, Shape], sizes: ModelSizes) -> ExpertLayout:
    """The form of the tensors found in a checkpoint. Two of them differ in the shapes alone; where
    a matrix is square, the other one of its expert tells."""
    ours = {name: shape for name, shape in sizes.shapes.items() if OF_EXPERTS in name}
    if any(OF_EXPERTS in name and name.endswith(".weight") for name in found):
        return ExpertLayout(ExpertStorage.single)
    turned: list[str] = []
    as_ours: list[str] = []
    square: list[str] = []
    for name, shape in ours.items():
        if found.get(name) == shape:
            (square if shape[1] == shape[2] else as_ours).append(name)
        elif found.get(name) == (shape[0], shape[2], shape[1]):
            turned.append(name)
    if not turned or as_ours:  # both: `check_tensors` lists those that differ
        return ExpertLayout(ExpertStorage.out_in)
    if square:
        raise CheckpointError(
            f"is stored as [experts, in, out], but {square[0]} {ours[square[0]]} is square, and "
            "transformers 5 would read it as [experts, out, in]",
            place=path,
            key=turned[0],
            remedy="store both as [experts, out, in]",
        )
    return ExpertLayout(ExpertStorage.in_out)
