"""The gated delta rule, which linear attention layers have in place of attention, in pure torch.

For each value head a state S [D, E] in fp32 is updated by each token:
S *= exp(g); S += k (beta (v - k^T S))^T; out = q^T S. Here 32 tokens are computed at once.

B rows, S tokens, K key heads, V value heads, R = V/K value heads of a key head, D width of a key, E
of a value, N chunks of C tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32  # faster than 16 and 64 at nearly all lengths
EPS = 1e-6  # added to the squared norm of queries and keys


def gated_delta_rule(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, g_BSV: Tensor, beta_BSV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, S, V, E] in v's dtype and the state [B, V, D, E] after the last token, in
    fp32, or in fp64 for fp64 inputs. Queries and keys are normed here; g is the log of the decay.

    The backward computes the chunks again from the inputs, which are all that is stored."""
    out, state = _DeltaRule.apply(q_BSKD, k_BSKD, v_BSVE, g_BSV, beta_BSV)
    return out, state


def delta_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BVE: Tensor, g_BV: Tensor, beta_BV: Tensor, state_BVDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, V, E] and the new state after one more token of each row."""
    wide = torch.promote_types(v_BVE.dtype, torch.float)
    values_per_key = v_BVE.shape[1] // k_BKD.shape[1]
    q_BVD, k_BVD = (
        _normed(x.to(wide))[0].repeat_interleave(values_per_key, 1) for x in (q_BKD, k_BKD)
    )
    q_BVD = q_BVD * q_BVD.shape[-1] ** -0.5
    state = state_BVDE.to(wide) * g_BV.to(wide).exp()[..., None, None]
    known_BVE = (k_BVD[..., None, :] @ state).squeeze(-2)
    fresh_BVE = (v_BVE.to(wide) - known_BVE) * beta_BV.to(wide)[..., None]
    state = state + k_BVD[..., None] * fresh_BVE[..., None, :]
    return (q_BVD[..., None, :] @ state).squeeze(-2).to(v_BVE.dtype), state


@dataclass
class _Chunks:
    """Numbers of all chunks, [N, B, K, R, ...], R being 1 where value heads share them."""

    q: Tensor  # [C, D], normed and scaled
    k: Tensor  # [C, D], normed
    q_scale: Tensor  # [C, 1], from the raw queries to q
    k_scale: Tensor
    v: Tensor  # [C, E]
    beta: Tensor  # [C, 1]
    since: Tensor  # [C, 1], decay from the start of the chunk to each token, which is included
    until: Tensor  # [C, 1], decay from after each token to the end of the chunk
    decay: Tensor  # [C, C], from after token j to token i
    keys: Tensor  # [C, C], k k^T
    system: Tensor  # [C, C], what the error of token i owes to that of token j; used below diagonal
    inside: Tensor  # [C, C], what the output of token i takes from token j
    solved: Tensor  # [C, E + D], errors without the state, and what the state adds to them
    read: Tensor  # [C, D], queries for the state at the start
    written: Tensor  # [C, D], keys for the state at the end


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunks:
    """Return what does not need the state, for all chunks at once."""
    values_per_key = v.shape[2] // k.shape[2]
    wide = torch.promote_types(v.dtype, torch.float)
    q, k = (_cut(x.to(wide), 1) for x in (q, k))
    v, g, beta = (_cut(x.to(wide), values_per_key) for x in (v, g[..., None], beta[..., None]))
    (q, q_scale), (k, k_scale) = _normed(q), _normed(k)
    q, q_scale = q * q.shape[-1] ** -0.5, q_scale * q.shape[-1] ** -0.5
    decay = _sums_between(g).exp_()
    since, until = g.cumsum(-2).exp_(), decay[..., -1, :, None]
    keys = k @ k.mT
    system = keys * decay * beta
    right = torch.cat([v * beta, k * (beta * since)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    inside = (q @ k.mT) * decay
    return _Chunks(
        *(q, k, q_scale, k_scale, v, beta, since, until, decay, keys, system, inside, solved),
        *(q * since, k * until),
    )


def _scan(x: _Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before each chunk and after the last, and all chunks' errors."""
    width = x.v.shape[-1]
    errors, seen = x.solved.split([width, x.k.shape[-1]], -1)
    state = errors.new_zeros(*errors.shape[1:-2], x.k.shape[-1], width)
    states, fresh = [], []
    for errors_n, seen_n, written_n, until_n in zip(
        *(each.unbind(0) for each in (errors, seen, x.written.mT, x.since[..., -1:, :])),
        strict=True,
    ):
        states.append(state)
        fresh.append(errors_n - seen_n @ state)
        state = state * until_n + written_n @ fresh[-1]
    return torch.stack(states), state, torch.stack(fresh)


class _DeltaRule(torch.autograd.Function):
    """The rule with a backward by hand that stores nothing but the inputs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.set_materialize_grads(False)
        x = _prepare(q, k, v, g, beta)
        states, state, fresh = _scan(x)
        out = x.read @ states + x.inside @ fresh
        return _joined(out, v.shape[1]).to(v.dtype), state.flatten(1, 2)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_out: Tensor | None, d_state: Tensor | None
    ) -> tuple[Tensor, ...]:
        q, k, v, g, beta = inputs = ctx.saved_tensors
        x = _prepare(*inputs)
        states, state, fresh = _scan(x)
        values_per_key = v.shape[2] // k.shape[2]
        d_out = torch.zeros_like(v) if d_out is None else d_out
        d_out = _cut(d_out.to(x.v.dtype), values_per_key)
        d_end = torch.zeros_like(state) if d_state is None else d_state.view_as(state)
        d_states, d_fresh = _scan_back(x, d_out, d_end)
        grads = _prepare_back(x, states, fresh, d_out, d_states, d_fresh)
        d_q, d_k, d_v, d_g, d_beta = (_joined(d, v.shape[1]) for d in grads)
        whole = (d_q, d_k, d_v, d_g.squeeze(-1), d_beta.squeeze(-1))
        return tuple(d.to(of.dtype) for d, of in zip(whole, inputs, strict=True))


def _scan_back(x: _Chunks, d_out: Tensor, d_state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states after each chunk and of all chunks' errors."""
    seen = x.solved[..., x.v.shape[-1] :]
    by_out, by_read = x.inside.mT @ d_out, x.read.mT @ d_out
    d_states, d_fresh = [], []
    chunks = (by_out, by_read, seen.mT, x.written, x.since[..., -1:, :])
    for by_out_n, by_read_n, seen_n, written_n, until_n in zip(
        *(each.flip(0).unbind(0) for each in chunks), strict=True
    ):
        d_states.append(d_state)
        d_fresh.append(by_out_n + written_n @ d_state)
        d_state = by_read_n + d_state * until_n - seen_n @ d_fresh[-1]
    return torch.stack(d_states[::-1]), torch.stack(d_fresh[::-1])


def _prepare_back(
    x: _Chunks, states: Tensor, fresh: Tensor, d_out: Tensor, d_states: Tensor, d_fresh: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta, in chunks."""
    d_read, d_inside = d_out @ states.mT, d_out @ fresh.mT
    d_written = fresh @ d_states.mT
    d_solved = torch.cat([d_fresh, -(d_fresh @ states.mT)], -1)
    d_right = torch.linalg.solve_triangular(x.system.mT, d_solved, upper=True, unitriangular=True)
    d_system = (d_right @ x.solved.mT).tril_(-1).neg_()
    d_errors, d_seen = d_right.split([x.v.shape[-1], x.k.shape[-1]], -1)
    # What g gets is never a difference of sums: it would lose digits.
    d_between = d_inside * x.inside + d_system * x.system
    d_between[..., -1, :] += (d_written * x.written).sum(-1)
    d_since = (d_read * x.read).sum(-1, keepdim=True)
    read_k = (d_seen * x.k).sum(-1, keepdim=True) * x.since
    d_since += read_k * x.beta
    until = x.since[..., -1:, :]
    d_since[..., -1:, :] += (states * d_states).sum((-2, -1))[..., None, None] * until
    d_g = _from_end(d_since) + _from_end(d_between).tril_(-1).sum(-1, keepdim=True)
    by_decay = d_system * x.decay
    d_beta = (d_errors * x.v).sum(-1, keepdim=True) + read_k
    d_beta += (by_decay * x.keys).sum(-1, keepdim=True)
    d_keys = (by_decay * x.beta).sum(3, keepdim=True)
    d_both = (d_inside * x.decay).sum(3, keepdim=True)
    d_q = d_both @ x.k + (d_read * x.since).sum(3, keepdim=True)
    d_k = d_both.mT @ x.q + (d_keys + d_keys.mT) @ x.k
    d_k += (d_seen * (x.beta * x.since) + d_written * x.until).sum(3, keepdim=True)
    scale = x.k.shape[-1] ** 0.5
    d_q = x.q_scale * (d_q - x.q * scale**2 * (x.q * d_q).sum(-1, keepdim=True))
    d_k = x.k_scale * (d_k - x.k * (x.k * d_k).sum(-1, keepdim=True))
    return d_q, d_k, d_errors * x.beta, d_g, d_beta


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors of length 1, and the factor of each."""
    scale = torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
    return x * scale, scale


def _cut(x_BSHW: Tensor, values_per_key: int) -> Tensor:
    """Return [N, B, K, R, C, W], with zeros after the last token."""
    if padding := -x_BSHW.shape[1] % CHUNK:
        x_BSHW = F.pad(x_BSHW, (0, 0, 0, 0, 0, padding))
    chunks = x_BSHW.unflatten(2, (-1, values_per_key)).unflatten(1, (-1, CHUNK))
    return chunks.permute(1, 0, 3, 4, 2, 5).contiguous()


def _joined(x: Tensor, tokens: int) -> Tensor:
    """Return chunks as [B, S, heads, W]."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :tokens].contiguous()


def _sums_between(g_C1: Tensor) -> Tensor:
    """Return [..., C, C]: at (i, j) the sum of g over j+1..i, and -inf above the diagonal. Its
    terms have one sign, so no digits are lost, unlike in a difference of two cumulative sums."""
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g_C1.device).triu()
    sums = g_C1.masked_fill(above, 0).cumsum(-2)
    return sums.masked_fill_(above.triu(1), float("-inf"))


def _from_end(x: Tensor) -> Tensor:
    """Return the sums of each row of a matrix and all below it."""
    return x.flip(-2).cumsum(-2).flip(-2)
