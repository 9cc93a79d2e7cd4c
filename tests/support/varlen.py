"""torch's attention for sequences of any lengths, on the CPU, where it has no kernel: the operators
behind torch.nn.attention.varlen get one, so that what calls them can be run."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - it makes the operators


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


@cache
def register() -> None:
    """Once in a process."""
    for name, kernel in (("_varlen_attn", _forward), ("_varlen_attn_backward", _backward)):
        torch.library.register_kernel(f"torch_attn::{name}", "cpu", kernel)
