"""A frozen weight of a linear layer that is stored as codes of 4 or 8 bits, `lora.base`.

It is a tensor like any other weight, with a shape, a dtype and a device, and takes its place among
the parameters of a module. A product with it computes its values, which are then forgotten again:
autograd keeps the codes, and the backward computes the values once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vlm.config.base_types import BaseType
from megatron_vlm.hf.block_codes import BlockCodes

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


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
