"""Gated delta rule, in chunks of tokens and token by token, in pure torch.

Each value head has a state S [D, E] in fp32. A token decays and corrects it, and reads from it:
S = exp(g) S; S = S + k (beta (v - k^T S))^T; out = q^T S.

In a chunk, the updates u_i of all tokens solve one triangular system, where S is the state before
the chunk, G_i the sum of g up to token i, and G_ij that after token j:
u_i + beta_i sum_{j<i} exp(G_ij) (k_i k_j) u_j = beta_i (v_i - exp(G_i) k_i^T S).

The choice between this program and flash-linear-attention's on CUDA is printed, and never falls
back silently.

Shapes: B rows, S tokens, K key heads, V value heads, D and E their widths, N chunks of C tokens,
G = B x K and H = B x V heads of all rows. Rows come first outside, chunks inside (NH...).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError, error_line
from megatron_vlm.family.decoder_layers import DELTA_CHUNK, GatedDeltaNet


def gated_delta_rule(
    q_BSKD: Tensor,
    k_BSKD: Tensor,
    v_BSVE: Tensor,
    g_BSV: Tensor,
    beta_BSV: Tensor,
    state_BVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, S, V, E] and the state [B, V, D, E] after the last token. Queries and keys
    are normalised here; g is the logarithm of the decay. Rows begin with the given state, which has
    no backward, or with an empty one."""
    inputs = q_BSKD, k_BSKD, v_BSVE, g_BSV, beta_BSV
    if state_BVDE is not None:
        return _forward(*inputs, state_BVDE=state_BVDE)
    out_BSVE, state_BVDE = _Rule.apply(*inputs)
    return out_BSVE, state_BVDE


def _forward(*inputs: Tensor, state_BVDE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    v_BSVE = inputs[2]
    out_NHCE, state_HDE = _outputs(_make_chunks(*inputs), state_BVDE)
    out_BSVE = torch.empty_like(v_BSVE, memory_format=torch.contiguous_format)
    _copy_tokens(out_NHCE, out_BSVE)
    return out_BSVE, state_HDE.unflatten(0, (v_BSVE.shape[0], -1))


class _Rule(torch.autograd.Function):
    """The rule with its own backward, which computes what it needs again. Only the inputs are
    stored for that: the numbers within the chunks are seven times as many."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        chunks = _make_chunks(*inputs)
        across = _backward_across_chunks(chunks, *grads)
        results = _backward_inside_chunks(chunks, across, copies=_copies(*inputs[1:3]))
        input_grads = tuple(torch.empty_like(x) for x in inputs)
        for result, grad in zip(results, input_grads, strict=True):
            _copy_tokens(result, grad)
        return input_grads


class _Chunks(NamedTuple):
    """Normalised inputs by chunk, and the effects of the tokens of a chunk on each other."""

    kq_NH2CD: Tensor  # keys, then queries: dimension 2 has 2C entries
    norm_NG2C1: Tensor  # factors that normalised them, by key head
    v_NHCE: Tensor
    beta_NHC1: Tensor
    decay_NHCC: Tensor  # at [i, j] exp of the sum of g over j+1..i; 0 above the diagonal
    since_NHC1: Tensor  # exp of the sum of g over 0..i
    products_NH2CC: Tensor  # decayed products of keys with keys, and of queries with keys
    inverse_NHCC: Tensor  # the solution of the chunk: updates = inverse @ (beta * errors)

    @property
    def k_NHCD(self) -> Tensor:
        """Return the normalised keys."""
        return self.kq_NH2CD[:, :, :DELTA_CHUNK]

    @property
    def until_end_NHC1(self) -> Tensor:
        """Return the decay from after each token to the end of its chunk."""
        return self.decay_NHCC[:, :, -1, :, None]

    @property
    def whole_NH11(self) -> Tensor:
        """Return the decay over each whole chunk."""
        return self.since_NHC1[:, :, -1:]


def _copies(k_BSKD: Tensor, v_BSVE: Tensor) -> int:
    return v_BSVE.shape[2] // k_BSKD.shape[2]


def _by_chunk(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, S, heads, ...] as [N, B x heads, C, ...], with zeros after the last token."""
    rows, tokens, heads = x.shape[:3]
    full, rest = divmod(tokens, DELTA_CHUNK)
    size = (full + (rest > 0), rows, heads, DELTA_CHUNK, *x.shape[3:])
    out = torch.empty(size, dtype=dtype, device=x.device)
    if full:
        out[:full] = x[:, : tokens - rest].unflatten(1, (full, -1)).movedim((1, 3), (0, 2))
    if rest:
        out[full, :, :, :rest] = x[:, tokens - rest :].movedim(2, 1)
        out[full, :, :, rest:] = 0
    return out.flatten(1, 2)


def _copy_tokens(x: Tensor, out: Tensor) -> None:
    """Copy [N, B x heads, C, ...] to [B, S, heads, ...]."""
    rows, tokens, heads = out.shape[:3]
    x = x.unflatten(1, (rows, heads))
    full, rest = divmod(tokens, DELTA_CHUNK)
    if full:
        out[:, : tokens - rest].unflatten(1, (full, -1)).copy_(x[:full].movedim((0, 2), (1, 3)))
    if rest:
        out[:, tokens - rest :] = x[full, :, :, :rest].movedim(1, 2)


def _below_diagonal(device: torch.device) -> Tensor:
    return torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=device).tril(-1)


def _decay_between(g_NHC: Tensor) -> Tensor:
    """Return at [i, j] exp of the sum of g over j+1..i, and 0 above the diagonal. The terms have
    one sign, so no digits are lost, unlike in a difference of two cumulative sums."""
    below = _below_diagonal(g_NHC.device)
    terms = g_NHC[..., None].expand(*g_NHC.shape, DELTA_CHUNK).masked_fill(~below, 0)
    return terms.cumsum(-2).masked_fill_(below.T, float("-inf")).exp_()


def _normalisation(x: Tensor, scale: float) -> Tensor:
    return (x * x).sum(-1, keepdim=True).add_(1e-6).rsqrt_().mul_(scale)


def _make_chunks(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, g_BSV: Tensor, beta_BSV: Tensor
) -> _Chunks:
    copies, width = _copies(k_BSKD, v_BSVE), k_BSKD.shape[-1]
    wide = torch.promote_types(v_BSVE.dtype, torch.float)
    k, q = k_BSKD.to(wide), q_BSKD.to(wide)
    norms = _normalisation(k, 1.0), _normalisation(q, width**-0.5)
    kq = torch.cat([_by_chunk(x * norm, wide) for x, norm in zip((k, q), norms, strict=True)], 2)
    v, g, beta = (_by_chunk(x, wide) for x in (v_BSVE, g_BSV, beta_BSV))
    decay, beta = _decay_between(g), beta[..., None]
    # Products of a key head first, then their copies: repeated keys would multiply again.
    products = (kq @ kq[:, :, :DELTA_CHUNK].mT).unflatten(2, (2, DELTA_CHUNK))
    if copies > 1:
        products, kq = products.repeat_interleave(copies, 1), kq.repeat_interleave(copies, 1)
    products *= decay[:, :, None]
    # The diagonal holds beta, not 1: `unitriangular` keeps the solver from reading it.
    system = products[:, :, 0] * beta
    one = torch.eye(DELTA_CHUNK, dtype=wide, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    norm = torch.cat([_by_chunk(norm, wide) for norm in norms], 2)
    return _Chunks(kq, norm, v, beta, decay, g.cumsum(-1).exp_()[..., None], products, inverse)


def _outputs(chunks: _Chunks, state_BVDE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs [N, H, C, E] and the last state."""
    heads, width = chunks.v_NHCE.shape[1], chunks.v_NHCE.shape[-1]
    state_HDE = chunks.v_NHCE.new_zeros(heads, chunks.kq_NH2CD.shape[-1], width)
    if state_BVDE is not None:
        state_HDE += state_BVDE.flatten(0, 1)
    out_NHCE = torch.empty_like(chunks.v_NHCE)
    for n, out in enumerate(out_NHCE):
        read = torch.bmm(chunks.kq_NH2CD[n], state_HDE).unflatten(1, (2, DELTA_CHUNK))
        read *= chunks.since_NHC1[n, :, None]
        errors = (chunks.v_NHCE[n] - read[:, 0]).mul_(chunks.beta_NHC1[n])
        updates = torch.bmm(chunks.inverse_NHCC[n], errors)
        torch.baddbmm(read[:, 1], chunks.products_NH2CC[n, :, 1], updates, out=out)
        # In place, so only now: the outputs above read the state before this chunk.
        state_HDE *= chunks.whole_NH11[n]
        state_HDE.baddbmm_(chunks.k_NHCD[n].mT, updates.mul_(chunks.until_end_NHC1[n]))
    return out_NHCE, state_HDE


class _States(NamedTuple):
    """State before each chunk, and the values that the tokens of the chunk find missing in it."""

    state_NHDE: Tensor
    error_NHCE: Tensor  # v - exp(G) k^T S
    update_NHCE: Tensor
    written_NHCE: Tensor  # updates decayed to the end of the chunk


def _compute_states(chunks: _Chunks) -> _States:
    v_NHCE, k_NHCD = chunks.v_NHCE, chunks.k_NHCD
    states = v_NHCE.new_empty(*v_NHCE.shape[:2], k_NHCD.shape[-1], v_NHCE.shape[-1])
    errors, updates, written = (torch.empty_like(v_NHCE) for _ in range(3))
    for n in range(len(v_NHCE)):
        if n == 0:
            states[0] = 0
        else:
            torch.mul(states[n - 1], chunks.whole_NH11[n - 1], out=states[n])
            states[n].baddbmm_(k_NHCD[n - 1].mT, written[n - 1])
        read = torch.bmm(k_NHCD[n], states[n]).mul_(chunks.since_NHC1[n])
        torch.sub(v_NHCE[n], read, out=errors[n])
        torch.mul(errors[n], chunks.beta_NHC1[n], out=read)
        torch.bmm(chunks.inverse_NHCC[n], read, out=updates[n])
        torch.mul(updates[n], chunks.until_end_NHC1[n], out=written[n])
    return _States(states, errors, updates, written)


class _Across(NamedTuple):
    """Gradients after the pass from the last chunk to the first: for keys, queries and decays as
    far as states carry them, and for the chunks' own systems."""

    states: _States
    kq_NH2CD: Tensor
    negated_and_out_NH2CE: Tensor  # minus that of beta * errors, then that of the outputs
    since_NHC: Tensor  # this and the next two belong to logarithms of decays
    until_end_NHC: Tensor
    whole_NH: Tensor


def _backward_across_chunks(
    chunks: _Chunks, out_BSVE: Tensor | None, state_BVDE: Tensor | None
) -> _Across:
    states = _compute_states(chunks)
    count, heads, _, width = chunks.v_NHCE.shape
    both = chunks.v_NHCE.new_empty(count, heads, 2, DELTA_CHUNK, width)
    both[:, :, 1] = 0 if out_BSVE is None else _by_chunk(out_BSVE, both.dtype)
    scale = torch.stack([chunks.since_NHC1 * chunks.beta_NHC1, chunks.since_NHC1], 2)
    d_state = torch.zeros_like(states.state_NHDE[0])
    if state_BVDE is not None:
        d_state.copy_(state_BVDE.flatten(0, 1))
    d_kq, d_written_keys = torch.empty_like(chunks.kq_NH2CD), torch.empty_like(chunks.k_NHCD)
    d_since = d_kq.new_empty(d_kq.shape[:3])
    d_until_end, d_whole = d_kq.new_empty(count, heads, DELTA_CHUNK), d_kq.new_empty(count, heads)
    for n in reversed(range(count)):
        d_update = torch.bmm(chunks.k_NHCD[n], d_state).mul_(chunks.until_end_NHC1[n])
        torch.sum(d_update * states.update_NHCE[n], -1, out=d_until_end[n])
        d_update.baddbmm_(chunks.products_NH2CC[n, :, 1].mT, both[n, :, 1])
        torch.neg(torch.bmm(chunks.inverse_NHCC[n].mT, d_update), out=both[n, :, 0])
        d_read = (both[n] * scale[n]).flatten(1, 2)
        torch.bmm(d_read, states.state_NHDE[n].mT, out=d_kq[n])
        torch.sum(d_kq[n] * chunks.kq_NH2CD[n], -1, out=d_since[n])
        torch.bmm(states.written_NHCE[n], d_state.mT, out=d_written_keys[n])
        d_state *= chunks.whole_NH11[n]
        torch.sum((d_state * states.state_NHDE[n]).sum(-1), -1, out=d_whole[n])
        d_state.baddbmm_(chunks.kq_NH2CD[n].mT, d_read)
    d_kq[:, :, :DELTA_CHUNK] += d_written_keys
    d_since = d_since.unflatten(2, (2, DELTA_CHUNK)).sum(2)
    return _Across(states, d_kq, both, d_since, d_until_end, d_whole)


def _sums_from(x: Tensor, dim: int) -> Tensor:
    """Return at [i] the sum of x over i..end."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _backward_inside_chunks(
    chunks: _Chunks, across: _Across, copies: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and beta by chunk."""
    below = _below_diagonal(across.kq_NH2CD.device)
    negated = across.negated_and_out_NH2CE[:, :, 0]
    d_products = across.negated_and_out_NH2CE.flatten(2, 3) @ across.states.update_NHCE.mT
    d_products = d_products.unflatten(2, (2, DELTA_CHUNK))
    d_system = d_products[:, :, 0].masked_fill_(~below, 0)
    d_beta = (d_system * chunks.products_NH2CC[:, :, 0]).sum(-1)
    d_beta -= (negated * across.states.error_NHCE).sum(-1)
    d_system *= chunks.beta_NHC1
    d_between = (d_products * chunks.products_NH2CC).sum(2)
    d_between[:, :, -1] += across.until_end_NHC
    across.since_NHC[..., -1] += across.whole_NH
    d_g = _sums_from(d_between, -2).masked_fill_(~below, 0).sum(-1)
    d_g += _sums_from(across.since_NHC, -1)
    d_products *= chunks.decay_NHCC[:, :, None]
    d_kq, d_products = across.kq_NH2CD, d_products.flatten(2, 3)
    if copies > 1:
        d_kq, d_products = (x.unflatten(1, (-1, copies)).sum(2) for x in (d_kq, d_products))
    kq = chunks.kq_NH2CD[:, ::copies]
    d_k, d_q = _backward_of_normalisation(kq, d_kq, d_products, chunks.norm_NG2C1)
    return d_q, d_k, negated.mul(-chunks.beta_NHC1), d_g, d_beta


def _backward_of_normalisation(
    kq_NG2CD: Tensor, d_kq_NG2CD: Tensor, d_products_NG2CC: Tensor, norm_NG2C1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and queries as they were given."""
    d_kq = d_kq_NG2CD.add_(d_products_NG2CC @ kq_NG2CD[:, :, :DELTA_CHUNK])
    d_kq[:, :, :DELTA_CHUNK] += d_products_NG2CC.mT @ kq_NG2CD
    along = (d_kq * kq_NG2CD).sum(-1, keepdim=True)
    along[:, :, DELTA_CHUNK:] *= kq_NG2CD.shape[-1]  # queries are scaled by the root of that
    d_kq.addcmul_(kq_NG2CD, along, value=-1).mul_(norm_NG2C1)
    d_k, d_q = d_kq.split(DELTA_CHUNK, 2)
    return d_k, d_q


def delta_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BVE: Tensor, g_BV: Tensor, beta_BV: Tensor, state_BVDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [B, V, E] of one token of each row, and the state after it."""
    copies, dtype = v_BVE.shape[1] // k_BKD.shape[1], v_BVE.dtype
    wide = state_BVDE.dtype
    k, q = k_BKD.to(wide), q_BKD.to(wide)
    k, q = k * _normalisation(k, 1.0), q * _normalisation(q, q.shape[-1] ** -0.5)
    k, q = (x.repeat_interleave(copies, 1) for x in (k, q))
    state = state_BVDE * g_BV.exp()[..., None, None]
    error = (v_BVE.to(wide) - (k[..., None, :] @ state)[..., 0, :]) * beta_BV[..., None]
    state = state + k[..., None] * error[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :].to(dtype), state


DeltaRule = Callable[..., tuple[Tensor, Tensor]]  # as gated_delta_rule

_KEY = "model.delta_rule"
_TRIED_TOKENS = 100
_MAX_ERROR = 0.02  # relative to the norm: bf16 has three digits


def choose_delta_rule(
    setting: str, sizes: GatedDeltaNet, dtype: torch.dtype, platform: Platform
) -> DeltaRule:
    """Return the function that computes the rule. This is a collective on CUDA: all ranks compute
    the same. flash-linear-attention is never imported where the device is a CPU: with Triton it
    would take CPU tensors and fail, and without it, it does not import."""
    if setting == "torch" or (setting == "auto" and not platform.is_cuda):
        return gated_delta_rule
    lacking = _try_fla(sizes, dtype, platform) if platform.is_cuda else "it needs CUDA"
    if setting == "fla" and lacking:
        raise ConfigError(
            f": flash-linear-attention cannot compute the delta rule here ({lacking})",
            key=_KEY,
            found=setting,
            remedy="pip install flash-linear-attention on a CUDA machine, or set "
            f"{_KEY}=auto, which takes the slower rule of this package instead",
        )
    is_first = torch.distributed.get_rank() == 0
    if all_reduce_max(int(lacking is not None)):
        reason = lacking or "another rank cannot run flash-linear-attention"
        if is_first:
            print_to_user(f"{_KEY}={setting} is torch: {reason}; linear attention runs slower")
        return gated_delta_rule
    if is_first:
        print_to_user(
            f"{_KEY}={setting} is fla, whose backward is not deterministic: set {_KEY}=torch "
            "for runs that resume bit for bit"
        )
    return fla_rule


def fla_rule(
    q_BSKD: Tensor,
    k_BSKD: Tensor,
    v_BSVE: Tensor,
    g_BSV: Tensor,
    beta_BSV: Tensor,
    state_BVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` by flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out_BSVE, state_BVDE = chunk_gated_delta_rule(
        *(x.contiguous() for x in (q_BSKD, k_BSKD, v_BSVE)),
        g=g_BSV,
        beta=beta_BSV,
        initial_state=state_BVDE,
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
    )
    return out_BSVE, state_BVDE


def _try_fla(sizes: GatedDeltaNet, dtype: torch.dtype, platform: Platform) -> str | None:
    """Compare forward and backward with this package's rule on the device. Return the reason why
    flash-linear-attention cannot be used, or None."""
    generator = torch.Generator().manual_seed(0)
    heads, widths = (sizes.key_heads, sizes.value_heads), (sizes.key_dim, sizes.value_dim)
    copies = heads[1] // heads[0]

    def random(*shape: int) -> Tensor:
        return torch.randn(1, _TRIED_TOKENS, *shape, generator=generator).to(platform.device)

    q, k, v = random(1, widths[0]), random(1, widths[0]), random(copies, widths[1])
    g, beta = -random(copies).abs(), random(copies).sigmoid()
    results = []
    for rule in (gated_delta_rule, fla_rule):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        try:
            with torch.enable_grad():
                out, _state = rule(inputs[0], inputs[1], inputs[2], g, beta)
                out.float().square().sum().backward()
        except Exception as error:  # a kernel that does not compile may raise anything
            return error_line(error)
        results.append([out.detach(), *(x.grad for x in inputs)])
    for right, tried in zip(*results, strict=True):
        assert right is not None and tried is not None
        distance = float((tried.float() - right.float()).norm() / right.float().norm())
        if not distance < _MAX_ERROR:  # unlike >=, this refuses NaN
            return f"its result differs by {distance:.1e} from this package's"
    return None
