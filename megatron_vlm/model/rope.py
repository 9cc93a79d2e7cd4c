"""Interleaved M-RoPE. Megatron's own `mrope` lays the three axes out in chunks; Qwen3-VL
interleaves them (t, h, w, t, h, w, ...), and a loose parity test would miss the difference.

Shapes: S tokens, B rows, D head size, F half the head size, 3 the axes time, height, width.
"""

from typing import Any

import torch
from torch import Tensor, nn


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
