"""torch's attention for sequences of any lengths, on the CPU, where it has no kernel: the operators
behind torch.nn.attention.varlen, and FlashAttention's own, get one, so that what calls them can be
run."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - it makes the operators

from tests.support.flash_attention4 import plain_module

MATH: Any = plain_module(deque(maxlen=0))


def _parts(starts: Tensor, *given: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """[N, L, D] of each image."""
    lengths = starts.diff().tolist()
    return zip(*(x.float().transpose(0, 1).split(lengths, 1) for x in given), strict=True)


def _joined(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts), 1).transpose(0, 1).to(dtype).contiguous()


def _weights(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_k: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    longest = int(starts.diff().max())
    assert starts.dtype is starts_k.dtype is torch.int32, "as the kernel wants them"
    assert more[:2] == (longest, longest) and not any(more[2:3]), "the longest, and not causal"
    made = (_weights(q, k) @ v for q, k, v in _parts(starts, query, key, value))
    sums = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float)
    return _joined(made, query.dtype), sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Any, _sums: Any, *more: Any
) -> tuple[Tensor, ...]:
    made = []
    for g, q, k, v in _parts(more[0], grad, query, key, value):
        weights, of_weights = _weights(q, k), g @ v.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        of_scores = of_scores * q.shape[-1] ** -0.5
        made.append((of_scores @ k, of_scores.mT @ q, weights.mT @ g))
    return tuple(_joined(parts, grad.dtype) for parts in zip(*made, strict=True))


def _given(starts: Tensor, starts_k: Tensor, *more: Any, **seen: Any) -> dict[str, Any]:
    longest, longest_k, dropout, causal, *_ = more
    lengths = int(starts.diff().max()), int(starts_k.diff().max()), 0.0
    assert (longest, longest_k, dropout) == lengths, "the longest, and no dropout"
    left, right = (seen[f"window_size_{side}"] for side in ("left", "right"))
    assert causal == ((left, right) == (-1, 0)), "as torch's varlen_attn has it"
    return {
        "softmax_scale": seen["scale"],
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
    assert sums.is_contiguous() and sums.dtype is torch.float and grad.is_contiguous()
    grads: tuple[Tensor, ...] = MATH._flash_attn_bwd(
        *parts, out, grad, sums, **_given(*more[5:], **seen)
    )
    return grads


@cache
def register() -> None:
    """Once in a process."""
    for name, kernel in (("_varlen_attn", _forward), ("_varlen_attn_backward", _backward)):
        torch.library.register_kernel(f"torch_attn::{name}", "cpu", kernel)
    for name, kernel in (("forward", _flash), ("backward", _flash_backward)):
        torch.library.register_kernel(f"aten::_flash_attention_{name}", "cpu", kernel)
