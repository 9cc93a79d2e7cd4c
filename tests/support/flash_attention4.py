"""FlashAttention 4 without a GPU: a module in the place of its package, whose functions are plain
math in fp32, and the operators by which torch calls it, on the CPU."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import _fa4

from megatron_vlm.family.flash_attention import activate

Calls = list[dict[str, Any]]


def _rows(given: dict[str, Any], *parts: Tensor) -> Iterator[list[Tensor]]:
    """Tensors [B, N, S, D] of each sequence, or of all rows at once, in fp32. Beside queries are
    the keys that they share, which come second and third."""
    starts, starts_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    cut = [(x,) for x in parts]
    if starts is not None:
        assert starts.dtype is starts_k.dtype is torch.int32
        of_each = [starts, starts_k, starts_k, *[starts] * len(parts[3:])]
        cut = [
            tuple(piece[None] for piece in x.split(s.diff().tolist()))
            for x, s in zip(parts, of_each, strict=True)
        ]
    for pieces in zip(*cut, strict=True):
        made = [x.transpose(1, 2).float() for x in pieces]
        copies = made[0].shape[1] // made[1].shape[1]
        yield [made[0], *(x.repeat_interleave(copies, 1) for x in made[1:3]), *made[3:]]


def _scores(query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
    """[B, N, Sq, Sk], with -inf where a query does not see a key."""
    queries, keys = (torch.arange(x.shape[2]) for x in (query, key))
    apart = keys[None] - (queries[:, None] + len(keys) - len(queries))
    left, right = given["window_size_left"], given["window_size_right"]
    hidden = apart > (0 if given["causal"] else len(keys) if right is None else right)
    hidden |= apart < -(len(keys) if left is None else left)
    return (query @ key.mT * given["softmax_scale"]).masked_fill(hidden, float("-inf"))


def _joined(rows: list[Tensor], given: dict[str, Any], like: Tensor) -> Tensor:
    made = [x.unflatten(1, (like.shape[-2], -1)).sum(2).transpose(1, 2) for x in rows]
    whole = made[0] if given["cu_seqlens_q"] is None else torch.cat(made, 1)[0]
    return whole.to(like.dtype)


def plain_module(calls: Any) -> ModuleType:
    """The package's module, which notes its calls."""
    module: Any = ModuleType("flash_attn.cute.interface")

    def note(query: Tensor, key: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        calls.append({"heads": (query.shape[-2], key.shape[-2]), **given})
        return {**given, "softmax_scale": given["softmax_scale"] or query.shape[-1] ** -0.5}

    def forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        given = note(query, key, given)
        outs, sums = [], []
        for q, k, v in _rows(given, query, key, value):
            scores = _scores(q, k, given)
            sums.append(scores.logsumexp(-1))
            outs.append(scores.softmax(-1) @ v)
        out = _joined(outs, given, query)
        if given["out"] is not None:
            out = given["out"].copy_(out)
        return out, sums[0] if given["cu_seqlens_q"] is None else torch.cat(sums, -1)[0]

    def backward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        d_out: Tensor,
        lse: Tensor,
        **given: Any,
    ) -> tuple[Tensor, ...]:
        given = note(query, key, given)
        made = []
        wide = lse.transpose(-1, -2)[..., None]
        for q, k, v, o, d_o, each_lse in _rows(given, query, key, value, out, d_out, wide):
            weights = (_scores(q, k, given) - each_lse).exp()
            d_scores = weights * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))
            d_scores = d_scores * given["softmax_scale"]
            made.append((d_scores @ k, d_scores.mT @ q, weights.mT @ d_o))
        d_query, d_key, d_value = (list(each) for each in zip(*made, strict=True))
        pairs = ((d_query, query), (d_key, key), (d_value, value))
        return tuple(_joined(each, given, like) for each, like in pairs)

    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    return module


@contextmanager
def flash_attention4() -> Iterator[Calls]:
    """Have it installed inside the context; give the arguments of its calls."""
    calls: Calls = []
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = {name: ModuleType(name) for name in names[:2]} | {names[2]: plain_module(calls)}
    _fa4._fa4_import_module.cache_clear()

    def rows(query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Any:
        made = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, *given, scale=more.get("scale")
        )
        return made[:2]

    def rows_backward(*given: Any, scale: float | None = None, **_: Any) -> Any:
        *tensors, dropout, causal = given
        none, lengths = (None, None), (given[1].shape[2], given[2].shape[2])
        end = (*none, *lengths, dropout, causal, *none)
        return _fa4._fa4_scaled_dot_product_flash_attention_backward_impl(
            *tensors, *end, scale=scale
        )

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has kernels of its own for two of the operators
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for check in ("_fa4_forward_support_error", "_fa4_backward_support_error"):
            stack.enter_context(mock.patch.object(_fa4, check, lambda *_: None))  # "not on CUDA"
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        name = "_scaled_dot_product_flash_attention"
        for operator, kernel in {
            "_flash_attention_forward": _fa4._fa4_flash_attention_forward_impl,
            "_flash_attention_backward": _fa4._fa4_flash_attention_backward_impl,
            name: _fa4._fa4_scaled_dot_product_flash_attention_forward_impl,
            f"{name}_for_cpu": rows,
            f"{name}_for_cpu_backward": rows_backward,
        }.items():
            library.impl(operator, kernel, "CPU")
        try:
            yield calls
        finally:
            activate("flash")
            _fa4._fa4_import_module.cache_clear()
