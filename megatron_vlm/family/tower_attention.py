"""Attention of the tower within each image, and in videos within each frame. It makes as few calls
as possible, where transformers makes one for each image or frame.

Shapes: P patches of all images, N heads, D head size, L patches of an image or frame, X images or
frames of one size in a row, C width.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vlm.family.cpu_matmul import with_mkl
from megatron_vlm.family.decoder_layers import fits_flash
from megatron_vlm.family.flash_attention import TORCH, is_flash, prefer_kernel
from megatron_vlm.family.spec import TowerHeads


class PackedAttention(nn.Module):
    """A replacement of transformers' module that keeps its parameters and their names. `heads`
    makes queries, keys and values from the output of `qkv`."""

    kernel = TORCH  # `set_kernel` sets it

    def __init__(self, given: Any, heads: TowerHeads):
        super().__init__()
        self.qkv, self.proj, self.num_heads = given.qkv, given.proj, given.num_heads
        self.heads = heads

    def forward(
        self,
        hidden_PC: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        starts: Tensor,
        **_: Any,
    ) -> Tensor:
        """Attend within each image or frame. `lengths` are their numbers of patches. `starts`
        (int32, on the device) are their first patches, followed by the end of the last."""
        parts = self.heads(self.qkv(hidden_PC), *position_embeddings, self.num_heads)
        return self.proj(attend_in_frames(*parts, lengths, starts, kernel=self.kernel).flatten(1))


def set_kernel(tower: nn.Module, kernel: str) -> None:
    """Let all blocks of a tower prefer this kernel of attention."""
    blocks: Iterator[Any] = tower.modules()
    for block in blocks:
        if hasattr(block, "kernel"):
            block.kernel = kernel


def attend_in_frames(
    query_PND: Tensor,
    key_PND: Tensor,
    value_PND: Tensor,
    lengths: Sequence[int],
    starts: Tensor,
    scale: float | None = None,
    kernel: str = TORCH,
) -> Tensor:
    """Return [P, N, D]: each patch attends to the patches of its image or frame. `scale` is that of
    the scores, if it is not D^-0.5."""
    if is_flash(kernel) and takes_lengths(query_PND):
        return attend_at_once(query_PND, key_PND, value_PND, lengths, starts, scale)
    with prefer_kernel(kernel):
        return attend_by_runs(query_PND, key_PND, value_PND, lengths, scale)


def takes_lengths(query: Tensor) -> bool:
    """Return whether FlashAttention takes sequences of any lengths with such heads [..., D]."""
    return query.is_cuda and query.dtype is torch.bfloat16 and fits_flash(query.shape[-1])


def attend_at_once(
    query_PND: Tensor,
    key_PND: Tensor,
    value_PND: Tensor,
    lengths: Sequence[int],
    starts: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attend with one call of torch's kernel for sequences of any lengths."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(lengths)
    # These arguments by position: the arguments that follow differ from torch 2.10 to 2.13.
    more: dict[str, Any] = {} if scale is None else {"scale": scale}
    parts = query_PND, key_PND, value_PND
    out_PND: Any = varlen_attn(*parts, starts, starts, longest, longest, **more)
    return out_PND


def attend_by_runs(
    query_PND: Tensor,
    key_PND: Tensor,
    value_PND: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """Attend with one call for each run of equal lengths, such as the frames of a video."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    sizes = [length * count for length, count in runs]
    parts = zip(runs, *(x.split(sizes) for x in (query_PND, key_PND, value_PND)), strict=True)
    outputs, attention = [], partial(F.scaled_dot_product_attention, scale=scale)
    for (length, _), *run_parts in parts:
        inputs_XNLD = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in run_parts)
        out_XNLD = with_mkl(attention, *inputs_XNLD)
        outputs.append(out_XNLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
