"""Chains of small operations in a layer, as functions of their tensors alone. A compiled chain
reads and writes memory once instead of once for each operation.

Shapes: S tokens of a row, B rows, T = S x B, H width, I width between the MLP's two linears, N
query heads, G key/value heads, D head size, F half the head size, Q = (N + 2 G) x D. In the vision
tower there are P patches, and Q = 3 x N x D. A gated delta net has X outputs of its first linear, K
key heads and V value heads of the widths D and E, and C channels of a convolution over W tokens.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import TowerHeads

COMPILERS = ("g++", "clang++", "gcc", "clang")


def norm(x_SBH: Tensor, weight_H: Tensor, eps: float, residual_SBH: Tensor | None = None) -> Tensor:
    """Apply RMSNorm, computed in fp32, and add it to a residual if there is one."""
    normed_SBH = F.rms_norm(x_SBH, weight_H.shape, weight_H, eps)
    return normed_SBH if residual_SBH is None else residual_SBH + normed_SBH


def centered_norm(x_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm in fp32 with 1 + weight, a sum of which bf16 would lose most of the weight."""
    weight_H = 1.0 + weight_H.float()
    return F.rms_norm(x_SBH.float(), weight_H.shape, weight_H, eps).to(x_SBH.dtype)


def swiglu(both_SB2I: Tensor) -> Tensor:
    """Multiply the second half of the values by SiLU of the first half, the gate."""
    gate_SBI, up_SBI = both_SB2I.chunk(2, dim=-1)
    return F.silu(gate_SBI) * up_SBI


def geglu(both_SB2I: Tensor) -> Tensor:
    """Multiply the second half of the values by GELU of the first half, with tanh."""
    gate_SBI, up_SBI = both_SB2I.chunk(2, dim=-1)
    return F.gelu(gate_SBI, approximate="tanh") * up_SBI


def heads(
    mixed_SBQ: Tensor,
    cos_SBF: Tensor,
    sin_SBF: Tensor,
    query_weight_D: Tensor,
    key_weight_D: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [S, B, N, D], keys and values [S, B, G, D] from the linear's output, in which
    each group has its queries, a key and a value. Queries and keys are normalised and rotated."""
    mixed_SBGXD = mixed_SBQ.unflatten(-1, (groups, -1, len(key_weight_D)))
    queries = mixed_SBGXD.shape[-2] - 2
    query_SBGXD, key_SBG1D, value_SBG1D = mixed_SBGXD.split([queries, 1, 1], dim=-2)
    query_SBND = norm(query_SBGXD.flatten(-3, -2), query_weight_D, eps)
    key_SBGD = norm(key_SBG1D.squeeze(-2), key_weight_D, eps)
    # Copied, because in a compiled chain the gradient of a view would be a separate tensor as large
    # as `mixed`.
    value_SBGD = value_SBG1D.squeeze(-2).contiguous()
    return (_rotate(query_SBND, cos_SBF, sin_SBF), _rotate(key_SBGD, cos_SBF, sin_SBF), value_SBGD)


def gated_heads(
    mixed_SBQ: Tensor,
    cos_SBF: Tensor,
    sin_SBF: Tensor,
    query_weight_D: Tensor,
    key_weight_D: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values as `heads`, and the gate of each query head [S, B, N, D].
    Each query head is followed by its gate. Norms are centered, and only the first 2 F values of a
    head are rotated."""
    mixed_SBGXD = mixed_SBQ.unflatten(-1, (groups, -1, len(key_weight_D)))
    query_rows = mixed_SBGXD.shape[-2] - 2
    queries, key_SBG1D, value_SBG1D = mixed_SBGXD.split([query_rows, 1, 1], dim=-2)
    query_SBND, gate_SBND = queries.unflatten(-2, (-1, 2)).flatten(-4, -3).unbind(-2)
    rotary = 2 * cos_SBF.shape[-1]

    def rotate_first(x: Tensor) -> Tensor:
        return torch.cat([_rotate(x[..., :rotary], cos_SBF, sin_SBF), x[..., rotary:]], dim=-1)

    query_SBND = centered_norm(query_SBND, query_weight_D, eps)
    key_SBGD = centered_norm(key_SBG1D.squeeze(-2), key_weight_D, eps)
    return (
        rotate_first(query_SBND),
        rotate_first(key_SBGD),
        value_SBG1D.squeeze(-2).contiguous(),
        gate_SBND.contiguous(),
    )


def unscaled_heads(
    mixed_SBQ: Tensor,
    cos_SBF: Tensor,
    sin_SBF: Tensor,
    query_weight_D: Tensor,
    key_weight_D: Tensor,
    groups: int,
    values: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as `heads`. Values are normalised as well, without a weight.
    Each group has its queries, its key and `values` values: with 0, its key is the value too."""
    mixed_SBGXD = mixed_SBQ.unflatten(-1, (groups, -1, len(key_weight_D)))
    queries = mixed_SBGXD.shape[-2] - 1 - values
    query_SBGXD, *rest = mixed_SBGXD.split([queries, *[1] * (1 + values)], dim=-2)
    key_SBGD, value_SBGD = rest[0].squeeze(-2), rest[-1].squeeze(-2)
    query_SBND = norm(query_SBGXD.flatten(-3, -2), query_weight_D, eps)
    return (
        rotate(query_SBND, cos_SBF, sin_SBF),
        rotate(norm(key_SBGD, key_weight_D, eps), cos_SBF, sin_SBF),
        F.rms_norm(value_SBGD, value_SBGD.shape[-1:], None, eps),
    )


def gate_output(out_SBQ: Tensor, gate_SBND: Tensor) -> Tensor:
    """Multiply the output of attention by the sigmoid of its gate."""
    return out_SBQ * gate_SBND.flatten(-2).sigmoid()


def tower_heads(
    mixed_PQ: Tensor, cos_PD: Tensor, sin_PD: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [P, N, D] of the vision tower from its linear's output.
    Queries and keys are rotated in fp32. Both halves of cos and sin are the same."""
    query_PND, key_PND, value_PND = mixed_PQ.unflatten(-1, (3, count, -1)).unbind(-3)
    cos_PF, sin_PF = (each.chunk(2, dim=-1)[0].float() for each in (cos_PD, sin_PD))
    rotated = (_rotate(each.float(), cos_PF, sin_PF) for each in (query_PND, key_PND))
    # Copied for the same reason as in `heads`.
    return *(each.to(mixed_PQ.dtype) for each in rotated), value_PND.contiguous()


def upcast_norm(
    x_PH: Tensor, weight_H: Tensor | None, eps: float, residual_PH: Tensor | None = None
) -> Tensor:
    """Apply RMSNorm like `norm`, in the operations of transformers' Gemma 4."""
    wide_PH = x_PH.float()
    wide_PH = wide_PH * torch.pow(wide_PH.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    normed_PH = (wide_PH if weight_H is None else wide_PH * weight_H.float()).to(x_PH.dtype)
    return normed_PH if residual_PH is None else residual_PH + normed_PH


def axial_heads(
    query_PX: Tensor,
    key_PX: Tensor,
    value_PX: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    query_weight_D: Tensor,
    key_weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [P, N, D] of the vision tower from the outputs of its three
    linears, normalised. The first half of a query or key is rotated by x and the second by y."""
    parts = (query_PX, query_weight_D), (key_PX, key_weight_D), (value_PX, None)
    query_PND, key_PND, value_PND = (
        upcast_norm(x_PX.unflatten(-1, (-1, len(key_weight_D))), weight_D, eps)
        for x_PX, weight_D in parts
    )
    turns = cos_PD[:, None], sin_PD[:, None]
    return rotate_axes(query_PND, *turns), rotate_axes(key_PND, *turns), value_PND


def rotate_axes(x_PND: Tensor, cos_P1D: Tensor, sin_P1D: Tensor) -> Tensor:
    """Rotate each half of a head by its own halves."""
    first, second, third, fourth = x_PND.chunk(4, dim=-1)
    turned_PND = torch.cat([-second, first, -fourth, third], dim=-1)
    return x_PND * cos_P1D + turned_PND * sin_P1D


def delta_inputs(
    projected_SBX: Tensor,
    weight_CW: Tensor,
    decay_V: Tensor,
    bias_V: Tensor,
    mixed: tuple[int, int, int],
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, ...]:
    """Return queries and keys [B, S, K, D], values [B, S, V, E], their gate [B, S, V x E], and in
    fp32 the logarithms of decays and beta [B, S, V] of a gated delta net. `mixed` has the channels
    of queries, keys and values, and `decay_V` the logarithms of the decays' rates."""
    parts = projected_SBX.transpose(0, 1).split([sum(mixed), mixed[2], *[len(bias_V)] * 2], dim=-1)
    mixed_BSC, gate_BSX, beta_BSV, a_BSV = parts
    query, key, value = convolve(mixed_BSC, weight_CW).split(mixed, dim=-1)
    by_row = [
        query.unflatten(-1, (-1, key_dim)),
        key.unflatten(-1, (-1, key_dim)),
        value.unflatten(-1, (-1, value_dim)),
        gate_BSX,
    ]
    if is_compiling():  # flash-linear-attention would copy each of them
        by_row = [each.contiguous() for each in by_row]
    return (
        *by_row,
        -decay_V.exp() * F.softplus(a_BSV.float() + bias_V.float()),
        beta_BSV.float().sigmoid(),
    )


def convolve(x_BSC: Tensor, weight_CW: Tensor) -> Tensor:
    """Apply the causal convolution of each channel, and SiLU. Rows begin with zeros."""
    channels, width = weight_CW.shape
    if is_compiling():  # a convolution would be a kernel of its own
        padded_BSC = F.pad(x_BSC, (0, 0, width - 1, 0)).float()
        tokens = x_BSC.shape[1]
        first, *rest = (
            padded_BSC[:, w : w + tokens] * weight_CW[:, w].float() for w in range(width)
        )
        return F.silu(sum(rest, first).to(x_BSC.dtype))
    x_BCS = F.pad(x_BSC.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(x_BCS, weight_CW[:, None], groups=channels)).transpose(1, 2)


def delta_outputs(out_BSVE: Tensor, gate_BSX: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Normalise each head of a gated delta net, then apply its gate. Return [S, B, V x E]."""
    dtype, gate_BSVE = out_BSVE.dtype, gate_BSX.unflatten(-1, out_BSVE.shape[2:])
    normed_BSVE = F.rms_norm(out_BSVE.float(), weight_E.shape, None, eps).to(dtype)
    normed_BSVE = weight_E.to(dtype) * normed_BSVE
    gated_BSVE = (normed_BSVE * F.silu(gate_BSVE.float())).to(dtype)
    return gated_BSVE.flatten(2).transpose(0, 1).contiguous()


def rotate(x_SBND: Tensor, cos_SBF: Tensor, sin_SBF: Tensor) -> Tensor:
    """Rotate the first F values of a head together with those that are half a head away."""
    count = cos_SBF.shape[-1]
    if 2 * count == x_SBND.shape[-1]:
        return _rotate(x_SBND, cos_SBF, sin_SBF)
    first, second = x_SBND.chunk(2, dim=-1)
    turned = torch.cat([first[..., :count], second[..., :count]], dim=-1)
    turned_first, turned_second = _rotate(turned, cos_SBF, sin_SBF).chunk(2, dim=-1)
    kept_first, kept_second = first[..., count:], second[..., count:]
    return torch.cat([turned_first, kept_first, turned_second, kept_second], dim=-1)


def _rotate(x_SBND: Tensor, cos_SBF: Tensor, sin_SBF: Tensor) -> Tensor:
    """Rotate each value together with the value that is half a head away."""
    first, second = x_SBND.chunk(2, dim=-1)
    cos, sin = cos_SBF[..., None, :], sin_SBF[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# Chains along the tokens of a row. The others compute each token alone.
BY_ROW = (delta_inputs, delta_outputs)


@dataclass(frozen=True)
class FusedOps:
    """Chains as the layers call them."""

    norm: Callable[..., Tensor] = norm
    swiglu: Callable[[Tensor], Tensor] = swiglu
    geglu: Callable[[Tensor], Tensor] = geglu
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = heads
    tower_heads: TowerHeads = tower_heads
    centered_norm: Callable[[Tensor, Tensor, float], Tensor] = centered_norm
    gated_heads: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = gated_heads
    unscaled_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = unscaled_heads
    upcast_norm: Callable[..., Tensor] = upcast_norm
    axial_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = axial_heads
    delta_inputs: Callable[..., tuple[Tensor, ...]] = delta_inputs
    delta_outputs: Callable[[Tensor, Tensor, Tensor, float], Tensor] = delta_outputs

    @staticmethod
    def compile(backend: str = "inductor") -> "FusedOps":
        """Return chains that torch compiles at their first call, once for any number of tokens."""
        eager = vars(FusedOps())
        return FusedOps(**{name: _compile_chain(eager[name], backend) for name in eager})


def _compile_chain(chain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a chain over [T] in place of [S, B]. Only one size changes instead of two; one of
    them, B, is often 1, and torch compiles a size of 1 separately. The rows of experts are [M]
    already."""
    # Only the sizes that are marked are dynamic. No other size becomes dynamic because it differs
    # in another model.
    fast = torch.compile(chain, backend=backend, dynamic=False)

    def call(*given: Any) -> Any:
        rows = given[0].shape[:-1]
        if rows.numel() < 2:  # one generated token of a single row
            return chain(*given)
        try:
            if chain in BY_ROW:
                return fast(*map(_mark_rows, given))
            out_T = fast(*map(_flatten_tokens, given))
            return tree_map(lambda made: made.unflatten(0, rows), out_T)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = next(iter(str(getattr(error, "inner_exception", error)).splitlines()), "")
            raise ConfigError(
                f": torch {torch.__version__} cannot compile {chain.__name__} here ({reason})",
                key="model.compile",
                remedy="set model.compile=false, or repair the compiler",
            ) from error

    return call


def _mark_rows(value: Any) -> Any:
    """Return the value, of which two sizes may change if it has rows of tokens. A single row is
    compiled separately."""
    if isinstance(value, Tensor) and value.dim() > 2:
        torch._dynamo.maybe_mark_dynamic(value, (0, 1))
    return value


def _flatten_tokens(value: Any) -> Any:
    """Return a tensor with rows flattened to one dynamic number of tokens, or a weight itself."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    flat = value.flatten(0, -2)
    torch._dynamo.maybe_mark_dynamic(flat, 0)
    return flat


class Norm(nn.Module):
    """RMSNorm; its weight is unset. A `centered` one multiplies by 1 + weight."""

    def __init__(
        self, chains: FusedOps, hidden_size: int, eps: float, centered: bool = False, **_: Any
    ):
        super().__init__()
        self.norm, self.eps = chains.centered_norm if centered else chains.norm, eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.norm(x_SBH, self.weight, self.eps)


def compiles(setting: bool | None, platform: Platform) -> bool:
    """Return whether layers should use compiled chains: `model.compile`. This is a collective on
    CUDA: ranks that share a layer compute the same."""
    lacking = None
    if setting or (setting is None and platform.is_cuda):
        lacking = missing_compiler(platform)
    if setting and lacking:
        raise ConfigError(
            f": {lacking}",
            key="model.compile",
            found=True,
            remedy="install it, or set model.compile=false, which gives the same numbers with more "
            "passes over memory",
        )
    if setting is not None or not platform.is_cuda:
        return bool(setting)
    if lacking:
        print_to_user(f"model.compile is off: {lacking}; layers run slower, with the same results")
    return not all_reduce_max(int(lacking is not None))


def missing_compiler(platform: Platform) -> str | None:
    """Return what torch needs to compile and is missing here, or None where nothing is missing."""
    if platform.is_cuda and importlib.util.find_spec("triton") is None:
        return "Triton is not installed, with which torch makes kernels"
    compiler = os.environ.get("CC" if platform.is_cuda else "CXX")
    if not any(map(shutil.which, [compiler] if compiler else COMPILERS)):
        return f"there is no C++ compiler ({compiler or ', '.join(COMPILERS)}), which torch calls"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} is missing (of Python's development files), which kernels include"
    return None
