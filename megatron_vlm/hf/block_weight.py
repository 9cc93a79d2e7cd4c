"""A frozen weight of a linear layer that is stored as codes of 4 or 8 bits, `lora.base`.

The weights of a block share a scale, their largest absolute value. A code stands for a value
between -1 and 1: for nf4, one of the 16 values of NF4 (QLoRA, arXiv 2305.14314), two codes in a
byte, the first in its upper half, digit for digit as in bitsandbytes; for int8, a multiple of
1/127. -1 and 1 have codes of their own, so the values of codes become the same codes again.

BlockWeight takes its place among the parameters of a module like any other weight. A product with
it computes its values, which are then forgotten: the backward computes them once more.

Shapes: W weights, B blocks of them, K bytes of codes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vlm.config.lora_base_types import WEIGHTS_PER_BLOCK, BaseType
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.expert_layouts import ReadSlice, Span, slices_of
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_INT8_STEPS = 127
_SMALLEST_SCALE = 1e-38  # the reciprocal of a smaller one is infinite
DECODED_AT_ONCE = 2**24  # weights whose fp32 values exist together: 64 MiB
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class BlockCodes:
    """Codes and scales of a number of weights."""

    base: BaseType
    codes_K: Tensor  # uint8 or int8
    scales_B: Tensor  # fp32

    @staticmethod
    def empty(base: BaseType, weights: int, device: torch.device) -> "BlockCodes":
        """Return unset codes and scales."""
        assert weights % WEIGHTS_PER_BLOCK == 0
        is_nf4 = base == "nf4"
        dtype = torch.uint8 if is_nf4 else torch.int8
        codes_K = torch.empty(weights // 2 if is_nf4 else weights, dtype=dtype, device=device)
        scales_B = torch.empty(weights // WEIGHTS_PER_BLOCK, device=device)
        return BlockCodes(base, codes_K, scales_B)

    def encode(self, weights: Tensor) -> None:
        """Store these weights, on any device, as codes."""
        flat_W, device = weights.reshape(-1), self.codes_K.device
        assert len(flat_W) == len(self.scales_B) * WEIGHTS_PER_BLOCK
        for first, last in self._slices():
            part_W = flat_W[first * WEIGHTS_PER_BLOCK : last * WEIGHTS_PER_BLOCK].to(device)
            blocks = part_W.float().view(-1, WEIGHTS_PER_BLOCK)
            scales_B = blocks.abs().amax(dim=1)
            shares = blocks * (1.0 / scales_B.clamp(min=_SMALLEST_SCALE))[:, None]
            codes = _encode(self.base, shares.clamp_(-1, 1).flatten())
            self.scales_B[first:last] = scales_B
            self.codes_K[self._bytes(first) : self._bytes(last)] = codes

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [W] that the codes stand for: computed in fp32, and rounded once."""
        out_W = torch.empty(
            len(self.scales_B) * WEIGHTS_PER_BLOCK, dtype=dtype, device=self.codes_K.device
        )
        for first, last in self._slices():
            codes = self.codes_K[self._bytes(first) : self._bytes(last)]
            values = _decode(self.base, codes).view(-1, WEIGHTS_PER_BLOCK)
            part_W = out_W[first * WEIGHTS_PER_BLOCK : last * WEIGHTS_PER_BLOCK]
            torch.mul(values, self.scales_B[first:last, None], out=part_W.view_as(values))
        return out_W

    def _slices(self) -> Iterator[tuple[int, int]]:
        blocks, step = len(self.scales_B), DECODED_AT_ONCE // WEIGHTS_PER_BLOCK
        for first in range(0, blocks, step):
            yield first, min(first + step, blocks)

    def _bytes(self, block: int) -> int:
        return block * WEIGHTS_PER_BLOCK // (2 if self.base == "nf4" else 1)


def rounded(weights: Tensor, base: BaseType) -> Tensor:
    """Return the values in fp32 that weights have once they are stored as codes."""
    codes = BlockCodes.empty(base, weights.numel(), weights.device)
    codes.encode(weights)
    return codes.decode(torch.float32).view(weights.shape)


def _encode(base: BaseType, shares_W: Tensor) -> Tensor:
    """Return the bytes of the codes of values between -1 and 1."""
    if base == "int8":
        return (shares_W * _INT8_STEPS).round_().to(torch.int8)
    values = torch.tensor(NF4_VALUES)
    codes_W = torch.zeros_like(shares_W, dtype=torch.uint8)
    for middle in ((values[:-1] + values[1:]) / 2).tolist():  # faster than a search
        codes_W += shares_W > middle
    return codes_W[::2] << 4 | codes_W[1::2]


def _decode(base: BaseType, codes_K: Tensor) -> Tensor:
    """Return the values between -1 and 1 of these bytes, in fp32."""
    if base == "int8":
        return codes_K.float().div_(_INT8_STEPS)
    return F.embedding(codes_K.int(), _nf4_pairs(codes_K.device)).flatten()  # faster than an index


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte. A copy for each product would make it wait."""
    values = torch.tensor(NF4_VALUES)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    return pairs.to(device)


class BlockWeight(torch.Tensor):
    """Weight as codes in blocks. Its blocks follow each other along the flattened weight."""

    codes: BlockCodes

    @staticmethod
    def __new__(cls, codes: BlockCodes, shape: Sequence[int], dtype: torch.dtype) -> "BlockWeight":
        """Make a weight of this shape whose values have this dtype."""
        device = codes.codes_K.device
        weight = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        weight.codes = codes
        assert isinstance(weight, BlockWeight)
        return weight

    @staticmethod
    def empty(
        base: BaseType, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """Return an unset parameter of this shape and dtype."""
        codes = BlockCodes.empty(base, shape.numel(), device)
        return nn.Parameter(BlockWeight(codes, shape, dtype), requires_grad=False)

    def dequantize(self) -> Tensor:
        """Return the values, as a plain tensor."""
        return self.codes.decode(self.dtype).view(self.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"BlockWeight({self.codes.base}, {list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute torch's linear layer without keeping the values for the backward. A product of
        Megatron's keeps the weight as it is given."""
        if func is F.linear:
            return _Linear.apply(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute any operation with the values in place of the codes."""
        if func in _ALIASES:
            weight = args[0]
            return BlockWeight(weight.codes, weight.shape, weight.dtype)
        # The result would be that of a copy, and be lost.
        assert not func._schema.is_mutable, f"{func} would change a weight that is stored as codes"
        if func is torch.ops.aten.new_empty.default:  # it needs no values
            like = args[0]
            return like.codes.codes_K.new_empty(args[1], **{"dtype": like.dtype, **(kwargs or {})})
        return func(*map(_values, args), **{k: _values(v) for k, v in (kwargs or {}).items()})


def _values(argument: Any) -> Any:
    return argument.dequantize() if isinstance(argument, BlockWeight) else argument


class _Linear(torch.autograd.Function):
    """Linear layer with a weight of codes. Weight and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
        assert bias is None or not bias.requires_grad
        ctx.save_for_backward(weight)
        return F.linear(x, weight.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0].matmul(weight.dequantize()), None, None


def replace_parameter(module: nn.Module, name: str, new: nn.Parameter) -> None:
    """Replace a parameter, and copy the marks of the former one to the new one."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    vars(new).update(vars(owner.get_parameter(leaf)))
    setattr(owner, leaf, new)


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
    """Return why the tensors beside the codes are wrong; empty if they are right."""
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
