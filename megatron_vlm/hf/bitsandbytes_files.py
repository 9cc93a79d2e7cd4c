"""Weights in 4 bits as bitsandbytes stores them: the codes under the name of the weight, and beside
them tensors with the scales of the blocks and a description in JSON.

The scales may be codes of 8 bits themselves ("double quantization"). They are read as fp32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_vlm.config.base_types import WEIGHTS_PER_BLOCK
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.block_weight import NF4_VALUES, BlockCodes
from megatron_vlm.hf.expert_layouts import ReadSlice, Span, slices_of
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

_MARK = ".quant_state.bitsandbytes__"
_SCALES_PER_BLOCK = 256  # scales that share a factor, where they are codes themselves
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Codes may be stored as numbers of another type, for sharding.
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_BYTES = {torch.uint8, torch.int8}
_REMEDY = "give the checkpoint in bf16 from which this one was made"


@dataclass(frozen=True)
class StoredBlocks:
    """A weight in 4 bits, and what it was before."""

    name: str
    shape: tuple[int, int]
    dtype: str  # safetensors' name
    offset: float | None  # mean of the scales if they are codes themselves

    @property
    def side_tensors(self) -> list[str]:
        """Names of the tensors that are stored beside the codes."""
        names = ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"]
        if self.offset is not None:
            names += ["nested_absmax", "nested_quant_map"]
        return [f"{self.name}.{name}" for name in names]

    def read(self, read: ReadSlice, spans: Sequence[Span]) -> Tensor:
        """Return a slice of the values, in fp32. `read` reads a stored tensor."""
        rows, width = self.shape
        first, last = (spans[0] if spans else None) or (0, rows)
        if width % WEIGHTS_PER_BLOCK:  # a block has parts of two rows
            return self._decoded(read, 0, rows)[(slice(first, last), *slices_of(spans[1:]))]
        return self._decoded(read, first, last)[(slice(None), *slices_of(spans[1:]))]

    def _decoded(self, read: ReadSlice, first_row: int, last_row: int) -> Tensor:
        width = self.shape[1]
        first, last = (row * width // WEIGHTS_PER_BLOCK for row in (first_row, last_row))
        size = read(self.name, [(0, 0)]).element_size()  # codes may be stored as another type
        per_block = WEIGHTS_PER_BLOCK // 2 // size
        codes = read(self.name, [(first * per_block, last * per_block)])
        codes_K = codes.contiguous().view(torch.uint8).flatten()
        blocks = BlockCodes("nf4", codes_K, self._scales(read, first, last))
        return blocks.decode(torch.float32).view(-1, width)

    def _scales(self, read: ReadSlice, first: int, last: int) -> Tensor:
        scales_B = read(f"{self.name}.absmax", [(first, last)])
        if self.offset is None:
            return scales_B.float()
        values = read(f"{self.name}.nested_quant_map", ()).float()
        blocks_B = torch.arange(first, last) // _SCALES_PER_BLOCK
        factors_B = read(f"{self.name}.nested_absmax", ()).float()[blocks_B]
        return values[scales_B.int()] * factors_B + self.offset


def find_blocks(
    place: str, shapes: Mapping[str, tuple[int, ...]], read: ReadSlice
) -> Iterator[StoredBlocks]:
    """Yield the weights in 4 bits among stored tensors. Refuse damaged ones and other forms."""
    for name in sorted(shapes):
        weight, mark, kind = name.partition(_MARK)
        if not mark:
            continue
        if kind != "nf4":
            raise CheckpointError(
                "is stored in 4 bits of another kind than NF4",
                place=place,
                key=weight,
                found=kind,
                allowed=("nf4",),
                remedy=_REMEDY,
            )
        file = UntrustedFile(f"{place}: {name}", CheckpointError, _REMEDY)
        if len(shapes[name]) != 1 or (state := read(name, ())).dtype != torch.uint8:
            raise file.error("is not the bytes of a text")
        stored = _describe(weight, JsonField(file.parse(state.numpy().tobytes()), "", file))
        if fault := _fault(stored, shapes, read):
            raise CheckpointError(fault, place=place, key=stored.name, remedy=_REMEDY)
        yield stored


def _describe(weight: str, state: JsonField) -> StoredBlocks:
    block = state["blocksize"]
    if block.value != WEIGHTS_PER_BLOCK:
        raise block.error(f"{WEIGHTS_PER_BLOCK}, the weights that share a scale here")
    sides = [side.whole(1) for side in state["shape"].items()]
    dtype = state["dtype"]
    if len(sides) != 2:
        raise state["shape"].error("the rows and columns of a matrix")
    if not isinstance(dtype.value, str) or dtype.value not in _DTYPES:
        raise dtype.error(f"one of {', '.join(_DTYPES)}")
    offset = None
    if (nested := state.get("nested_blocksize")) is not None:
        if nested.value != _SCALES_PER_BLOCK:
            raise nested.error(str(_SCALES_PER_BLOCK))
        offset = float(state["nested_offset"].number())
    return StoredBlocks(weight, (sides[0], sides[1]), _DTYPES[dtype.value], offset)


def _fault(stored: StoredBlocks, shapes: Mapping[str, tuple[int, ...]], read: ReadSlice) -> str:
    """Return why the tensors beside the codes, their sizes or types are wrong; empty if they are
    right."""
    names, weights = stored.side_tensors, prod(stored.shape)
    if missing := [name for name in (stored.name, *names) if name not in shapes]:
        return f"lacks {', '.join(missing)}"
    if weights % WEIGHTS_PER_BLOCK:
        return f"has {weights} values, not a whole number of blocks of {WEIGHTS_PER_BLOCK}"
    blocks, is_nested = weights // WEIGHTS_PER_BLOCK, stored.offset is not None
    sizes: dict[str, tuple[int, ...]] = {names[0]: (blocks,), names[1]: (16,)}
    if is_nested:
        sizes |= {names[3]: (-(-blocks // _SCALES_PER_BLOCK),), names[4]: (256,)}
    kinds = dict.fromkeys(sizes, _FLOATS) | {stored.name: _FLOATS | _BYTES}
    kinds |= {names[0]: {torch.uint8}} if is_nested else {}
    dtypes = {name: read(name, [(0, 0)] if shapes[name] else ()).dtype for name in kinds}
    sizes = {stored.name: (weights // 2 // dtypes[stored.name].itemsize, 1), **sizes}
    if wrong := [name for name in kinds if dtypes[name] not in kinds[name]]:
        return f"has values of {dtypes[wrong[0]]} in {wrong[0]}, which bitsandbytes never has"
    if misfits := [name for name, shape in sizes.items() if shapes[name] != shape]:
        name = misfits[0]
        return f"has {shapes[name]} values in {name}, and needs {sizes[name]}"
    if not torch.allclose(read(names[1], ()).float(), torch.tensor(NF4_VALUES), atol=1e-6):
        return f"has other values in {names[1]} than those of NF4"
    return ""
