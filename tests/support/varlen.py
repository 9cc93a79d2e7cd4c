"""torch's attention for sequences of any lengths, on the CPU, where it has no kernel: the operators
behind torch.nn.attention.varlen, and FlashAttention's own, get one, so that what calls them can be
run."""

from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - it makes the operators

from tests.support.flash_attention4 import plain_module

MATH: Any = plain_module(deque(maxlen=0))


def _given(starts: Tensor, starts_k: Tensor, *more: Any, **seen: Any) -> dict[str, Any]:
    longest, longest_k, dropout, causal, *_ = more
    lengths = int(starts.diff().max()), int(starts_k.diff().max()), 0.0
    assert (longest, longest_k, dropout) == lengths, "the longest, and no dropout"
    left, right = (seen[f"window_size_{side}"] for side in ("left", "right"))
    assert causal == ((left, right) == (-1, 0)), "as torch's varlen_attn has it"
    return {
        "softmax_scale": seen.get("scale"),
        "causal": causal,
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 else right,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts_k,
    }


def _flash(query: Tensor, key: Tensor, value: Tensor, *more: Any, **seen: Any) -> Any:
    out, sums = MATH._flash_attn_fwd(query, key, value, out=None, **_given(*more, **seen))
    unused = torch.zeros(0)
    return out, sums.contiguous(), unused, unused.clone(), unused.clone()


def _flash_backward(grad: Tensor, *more: Any, **seen: Any) -> tuple[Tensor, ...]:
    *parts, out, sums = more[:5]
    assert sums.is_contiguous() and sums.dtype is torch.float
    grads: tuple[Tensor, ...] = MATH._flash_attn_bwd(
        *parts, out, grad, sums, **_given(*more[5:], **seen)
    )
    return grads


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *lengths, causal = given[:8]
    out, sums, *_ = _flash(*lengths, 0.0, causal, False, **_whole(*given[8:9]))
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    *lengths, causal = given[:11]
    return _flash_backward(*lengths, 0.0, causal, **_whole(*given[12:13]))


def _whole(scale: float | None = None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": -1, "window_size_right": -1}


@cache
def register() -> None:
    """Once in a process."""
    for name, kernel in (("_varlen_attn", _forward), ("_varlen_attn_backward", _backward)):
        torch.library.register_kernel(f"torch_attn::{name}", "cpu", kernel)
    for name, kernel in (("forward", _flash), ("backward", _flash_backward)):
        torch.library.register_kernel(f"aten::_flash_attention_{name}", "cpu", kernel)
