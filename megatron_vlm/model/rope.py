"""Interleaved M-RoPE. Megatron's own `mrope` lays the three axes out in chunks; Qwen3-VL
interleaves them (t, h, w, t, h, w, ...), and a loose parity test would miss the difference.
`mrope_positions` in family/qwen/model.py makes the position ids.

Shapes: S tokens, B rows, D head size, F half the head size, 3 the axes time, height, width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.family.decoder_layers import Attention, MRoPE, ProportionalRoPE
from megatron_vlm.family.spec import TextSizes


class InterleavedMRoPE(nn.Module):
    """Rotary embedding from position ids [3, B, S]: cos and sin [2, S, B, F] in a dtype, or for
    Megatron's own attention, which computes these in each layer, the angles [S, B, 1, D]."""

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        section: list[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ):
        """Prepare the frequencies. `dtype` is that of cos and sin; without it, `forward` returns
        angles."""
        super().__init__()
        self.dtype = dtype
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        axis = torch.zeros(head_dim // 2, dtype=torch.long)
        for dim in (1, 2):  # height, width; time has the rest
            axis[dim : section[dim] * 3 : 3] = dim
        self.axis = axis.to(device)
        self.register_buffer("inv_freq", (1.0 / theta**exponents).to(device), persistent=False)

    @torch.no_grad()
    def forward(self, position_ids_3BS: Tensor, *_: Any, **__: Any) -> Tensor:
        positions_SBF = position_ids_3BS.float().permute(2, 1, 0)[..., self.axis]
        angles_SBF = positions_SBF * self.inv_freq
        if self.dtype is None:
            return torch.cat([angles_SBF, angles_SBF], dim=-1)[:, :, None, :]
        return torch.stack([angles_SBF.cos(), angles_SBF.sin()]).to(self.dtype)


def build_rotary(text: TextSizes, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Build the rotary embedding of the attention of all layers."""
    if isinstance(text.attentions[0].rotary, ProportionalRoPE):
        return PlainRoPE(text, device, dtype)
    shared: MRoPE
    (shared,) = {each.rotary for each in text.attentions if isinstance(each.rotary, MRoPE)}
    return InterleavedMRoPE(shared.dim, shared.theta, list(shared.section), device, dtype)


def rotary_spans(text: TextSizes) -> dict[Attention, tuple[int, int]]:
    """Return where the cos and sin of each kind of attention are in the joint table."""
    spans: dict[Attention, tuple[int, int]] = {}
    start = 0
    for each in text.attentions:
        assert isinstance(each.rotary, ProportionalRoPE)
        spans[each] = (start, start + each.rotary.count)
        start += each.rotary.count
    return spans


class PlainRoPE(nn.Module):
    """Rotary embedding from the places of tokens, for all kinds of attention side by side: cos and
    sin [2, S, B, F]. Of position ids [3, B, S] it reads the first row."""

    inv_freq: Tensor

    def __init__(self, text: TextSizes, device: torch.device, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype
        parts = []
        for each in text.attentions:
            assert isinstance(each.rotary, ProportionalRoPE)
            exponents = torch.arange(0, 2 * each.rotary.count, 2, dtype=torch.float)
            parts.append(1.0 / each.rotary.theta ** (exponents / each.rotary.head_dim))
        self.register_buffer("inv_freq", torch.cat(parts).to(device), persistent=False)

    @torch.no_grad()
    def forward(self, position_ids_3BS: Tensor, *_: Any, **__: Any) -> Tensor:
        angles_SBF = position_ids_3BS[0].float().T[..., None] * self.inv_freq
        return torch.stack([angles_SBF.cos(), angles_SBF.sin()]).to(self.dtype)
