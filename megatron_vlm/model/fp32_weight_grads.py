"""Weight gradients of the decoder's linears that are never rounded to bf16: each product is added
to Megatron's fp32 buffer as it is computed. Megatron does this with a kernel of Apex
(gradient_accumulation_fusion); where Apex is missing, torch's own product takes its place.

Shapes: T tokens, I inputs and O outputs of a linear.
"""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.device import Platform
from megatron_vlm.errors import ConfigError


def add_product(given_TI: Tensor, grad_TO: Tensor, total_OI: Tensor) -> None:
    """Add grad^T @ given to the total. The operands may be bf16; the total is fp32."""
    if given_TI.is_cuda and given_TI.dtype is not torch.float32:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_TO.t(), given_TI, torch.float32, out=total_OI)
    else:  # no CPU kernel takes bf16 and returns fp32
        total_OI.addmm_(grad_TO.float().t(), given_TI.float())


def accumulates_fp32(setting: bool | None, dtype: torch.dtype, platform: Platform) -> bool:
    """Return whether Megatron should add products to its buffers (`model.fp32_weight_gradients`),
    and make it able to. This is a collective on CUDA in bf16: all replicas must accumulate the same
    gradients."""
    if dtype is torch.float32 or setting is False or (setting is None and not platform.is_cuda):
        return False
    failure = None
    if not layers._grad_accum_fusion_available:
        failure = _failure(dtype, platform)
    if setting and failure:
        raise ConfigError(
            f": torch {torch.__version__} cannot add a product of {dtype} to fp32 here ({failure})",
            key="model.fp32_weight_gradients",
            found=True,
            remedy="set it to null",
        )
    if platform.is_cuda and all_reduce_max(int(failure is not None), platform.device):
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
        layers._grad_accum_fusion_available = True
    return True


def _failure(dtype: torch.dtype, platform: Platform) -> str | None:
    """Return what goes wrong with a product that bf16 would round: 1 + 256 ones, added to 1/2."""
    ones = torch.ones(257, 16, dtype=dtype, device=platform.device)
    total = torch.full((16, 16), 0.5, device=platform.device)
    try:
        add_product(ones, ones, total)
    except (AttributeError, RuntimeError) as error:  # an older torch has no such operator
        return str(error).splitlines()[0]
    is_wrong = total.ne(257.5).any()
    return f"it gives {total[0, 0]:.1f} in place of 257.5" if is_wrong else None
