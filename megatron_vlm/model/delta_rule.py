"""Gated delta rule, in chunks of tokens and token by token, in pure torch.

Each value head has a state S [D, E] in fp32. A token decays and corrects it, and reads from it:
S = exp(g) S; S = S + k (beta (v - k^T S))^T; out = q^T S.

Shapes: B rows, S tokens, K key heads, V value heads, D and E their widths, N chunks of C tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.family.decoder_layers import DELTA_CHUNK


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _sums_between(g_C: Tensor) -> Tensor:
    """Return at [i, j] the sum of g over j+1..i, and -inf above the diagonal. The terms have one
    sign, so no digits are lost, unlike in a difference of two cumulative sums."""
    chunk = g_C.shape[-1]
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=g_C.device).tril(-1)
    rows = g_C[..., :, None].expand(*g_C.shape, chunk).masked_fill(~below, 0)
    return rows.cumsum(-2).masked_fill(below.T, float("-inf"))


def gated_delta_rule(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, g_BSV: Tensor, beta_BSV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, S, V, E] and the state [B, V, D, E] after the last token. Queries and keys
    are normalised here; g is the logarithm of the decay. Every row begins with an empty state."""
    out_BSVE, state_BVDE = _Recomputed.apply(q_BSKD, k_BSKD, v_BSVE, g_BSV, beta_BSV)
    return out_BSVE, state_BVDE


class _Recomputed(torch.autograd.Function):
    """The rule, whose backward computes it again. Only its inputs are kept for that: the numbers
    within the chunks are seven times as many."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return _in_chunks(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_(needed)
                for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
            ]
            outputs = _in_chunks(*inputs)
        # Where nothing has used the state, its gradient is zero: without one, autograd would make
        # zeros for parts of the last chunk.
        pairs = zip(outputs, grads, strict=True)
        output_grads = [torch.zeros_like(out) if grad is None else grad for out, grad in pairs]
        learning = [x for x in inputs if x.requires_grad]
        input_grads = iter(torch.autograd.grad(outputs, learning, output_grads))
        return tuple(next(input_grads) if x.requires_grad else None for x in inputs)


def _in_chunks(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, g_BSV: Tensor, beta_BSV: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, (value_heads, width) = v_BSVE.shape[1], v_BSVE.shape[2:]
    copies, dtype = value_heads // k_BSKD.shape[2], v_BSVE.dtype
    wide = torch.promote_types(dtype, torch.float)
    padding = -tokens % DELTA_CHUNK

    def by_chunk(x: Tensor) -> Tensor:  # [B, S, heads, ...] -> [B, heads, N, C, ...]
        x = F.pad(x.to(wide), (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, DELTA_CHUNK)).movedim(3, 1)

    def by_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(copies, 1) if copies > 1 else x

    q = by_chunk(_normalised(q_BSKD.to(wide)) * q_BSKD.shape[-1] ** -0.5)
    k = by_chunk(_normalised(k_BSKD.to(wide)))
    v, g, beta = (by_chunk(x) for x in (v_BSVE, g_BSV, beta_BSV))
    since, between = g.cumsum(-1), _sums_between(g)
    decay = between.exp()
    system = by_value_head(k @ k.mT) * decay * beta[..., None]
    inside = by_value_head(q @ k.mT) * decay
    k, q = by_value_head(k), by_value_head(q) * since.exp()[..., None]
    right = torch.cat([v * beta[..., None], k * (beta * since.exp())[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split([width, k.shape[-1]], -1)
    k = (k * between[..., -1, :].exp()[..., None]).mT
    whole = since[..., -1].exp()[..., None, None]
    state = k.new_zeros(k.shape[0], value_heads, k.shape[-2], width)
    outs = []
    # Unbound at once: the gradient of each chunk taken alone would be as large as all of them.
    for new_n, seen_n, q_n, inside_n, k_n, whole_n in zip(
        *(x.unbind(2) for x in (new, seen, q, inside, k, whole)), strict=True
    ):
        fresh = new_n - seen_n @ state
        outs.append(q_n @ state + inside_n @ fresh)
        state = state * whole_n + k_n @ fresh
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :tokens]
    return out.transpose(1, 2).to(dtype), state


def delta_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BVE: Tensor, g_BV: Tensor, beta_BV: Tensor, state_BVDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [B, V, E] of one token of each row, and the state after it."""
    copies, dtype = v_BVE.shape[1] // k_BKD.shape[1], v_BVE.dtype
    wide = state_BVDE.dtype
    q, k = (_normalised(x.to(wide)).repeat_interleave(copies, 1) for x in (q_BKD, k_BKD))
    q = q * q.shape[-1] ** -0.5
    state = state_BVDE * g_BV.exp()[..., None, None]
    error = (v_BVE.to(wide) - (k[..., None, :] @ state)[..., 0, :]) * beta_BV[..., None]
    state = state + k[..., None] * error[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :].to(dtype), state
