"""Pieces of tensors on a rank, as rectangles of the checkpoint's tensors, and the files that store
them.

A checkpoint has Hugging Face's tensors, whole and without padding. Each rank writes the rectangles
that it holds to its own safetensors file, and any layout reads those that it needs from all files.
No tensor is exchanged between ranks."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.matrices import FAR_ROW, Rectangle
from megatron_vlm.io.untrusted import UntrustedFile, require_file

TensorShape = tuple[int, ...]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Piece:
    """Rectangle of a tensor. `data` is a view of the rank's own tensor: read it or fill it."""

    key: str
    row: int
    col: int
    data: Tensor

    @property
    def place(self) -> Rectangle:
        rows, cols = self.data.shape
        return self.row, self.col, rows, cols

    @property
    def name(self) -> str:
        """Name of the piece in the rank's file."""
        return _piece_name(self.key, self.row, self.col)


def _piece_name(key: str, row: int, col: int) -> str:
    return f"{key}@{row},{col}"


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, one tensor at a time, so that there is no second copy
    of all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        yield tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data


def make_index(
    shapes: Mapping[str, TensorShape], held: Sequence[Sequence[tuple[str, Rectangle]]]
) -> dict[str, Any]:
    """Return an index of the rectangles of each tensor: each rectangle and the rank whose file has
    it. Raise CheckpointError unless every tensor of `shapes` is there and complete."""
    index: dict[str, Any] = {}
    for rank, pieces in enumerate(held):
        for key, place in pieces:
            shape = shapes[key.rpartition("/")[2]]
            entry = index.setdefault(key, {"shape": list(shape), "pieces": []})
            entry["pieces"].append([rank, *place])
    faults = {name: "is not among them" for name in shapes if name not in index}
    for key, entry in index.items():
        places = {tuple(piece[1:]) for piece in entry["pieces"]}
        covered, size = sum(rows * cols for _, _, rows, cols in places), math.prod(entry["shape"])
        if covered != size or len(places) != len(entry["pieces"]):
            faults[key] = f"has {covered} of {size} values"
    if faults:
        key, fault = next(iter(faults.items()))
        raise CheckpointError(
            f"{len(held)} ranks wrote only a part of the model: {len(faults)} of {len(shapes)} "
            f"tensors are incomplete, the first: {key} {fault}",
            place="checkpoint",
            found=faults,
            remedy="start as many processes as the layout needs",
        )
    return index


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class PieceReader:
    """Reader of rectangles of a checkpoint's tensors from the ranks' files."""

    def __init__(self, folder: Path, index: Mapping[str, Any]):
        self.folder = folder
        self.index = index
        self.files: dict[int, Any] = {}

    def check(self, keys: Iterable[str], shapes: Mapping[str, TensorShape], remedy: str) -> None:
        """Refuse a checkpoint of another model before anything is filled: one that lacks some of
        `keys`, or one with tensors that are not in `shapes`, which a run that continues from it
        would lose."""
        faults = {}
        for key in dict.fromkeys(keys):
            expected = list(shapes[key.rpartition("/")[2]])
            if key not in self.index:
                faults[key] = "is not in it"
            elif (stored := self.index[key]["shape"]) != expected:
                faults[key] = f"is {stored} in it, and {expected} in the model"
        for name in sorted({key.rpartition("/")[2] for key in self.index}):
            if name not in shapes:
                faults[name] = (
                    "is in it and would not be loaded, so what it has learnt would be lost"
                )
        if faults:
            name, fault = next(iter(faults.items()))
            raise CheckpointError(
                "the checkpoint does not fit this model, its model.freeze_* and lora.*: "
                f"{len(faults)} tensors differ, such as {name}, which {fault}",
                place=str(self.folder),
                found=faults,
                remedy=remedy,
            )

    def fill(self, piece: Piece) -> None:
        """Copy a rectangle into `piece.data`, from any number of stored pieces."""
        row, col, rows, cols = piece.place
        missing = rows * cols
        for rank, at_row, at_col, num_rows, num_cols in self.index[piece.key]["pieces"]:
            top, bottom = max(row, at_row), min(row + rows, at_row + num_rows)
            left, right = max(col, at_col), min(col + cols, at_col + num_cols)
            if top >= bottom or left >= right:
                continue
            with outside_file(self.folder / rank_file(rank)).wrap_errors(f"of {piece.key}"):
                stored = self._file(rank).get_slice(_piece_name(piece.key, at_row, at_col))
                values = stored[top - at_row : bottom - at_row, left - at_col : right - at_col]
                piece.data[top - row : bottom - row, left - col : right - col].copy_(values)
                missing -= values.numel()
        if missing:
            raise outside_file(self.folder / "index.json").error(
                f"of {piece.key}, {missing} values are in none of its pieces, or in several"
            )

    def read_tensor(self, key: str) -> Tensor:
        """Return a tensor in its own shape, in fp32, which holds all stored values exactly."""
        shape = self.index[key]["shape"]
        with outside_file(self.folder / "index.json").wrap_errors(f"{key} has the shape {shape}"):
            tensor = torch.empty(shape, dtype=torch.float32)
        self.fill(Piece(key, 0, 0, tensor.view(shape[0], -1)))
        return tensor

    def _file(self, rank: int) -> Any:
        if rank not in self.files:
            path = require_file(self.folder / rank_file(rank))
            self.files[rank] = safe_open(path, framework="pt")
        return self.files[rank]


def outside_file(path: Path) -> UntrustedFile:
    """Return a file of a checkpoint as untrusted input."""
    return UntrustedFile(str(path), CheckpointError, "use another checkpoint")


def read_index(folder: Path) -> dict[str, Any]:
    """Read index.json: each tensor's shape and its pieces, each a rank and a rectangle."""
    index: dict[str, Any] = {}
    for key, entry in outside_file(folder / "index.json").json().object().items():
        shape = [side.whole(1, FAR_ROW) for side in entry["shape"].items()]
        pieces = [
            [number.whole(0, FAR_ROW) for number in p.items()] for p in entry["pieces"].items()
        ]
        if not shape or any(len(piece) != 5 for piece in pieces):
            raise entry.error("a shape, and pieces of a rank, a row, a column, rows and columns")
        index[key] = {"shape": shape, "pieces": pieces}
    return index
