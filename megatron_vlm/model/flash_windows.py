"""Attention in a window by FlashAttention, which takes no mask. One call lets each token see the
last tokens, and with pictures another one lets it see the later tokens of its picture. No pair of
tokens is in both, so the log-sum-exps of their scores tell the weights of the two outputs. Each
backward takes the output and the log-sum-exps of both calls together.

Shapes: S tokens of a row (Megatron is sequence first), B rows, T tokens of all rows, N query heads,
G key heads, D head size, X pictures, P their tokens, except one of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.family.spec import Tokens


@dataclass(frozen=True)
class PictureTokens:
    """Tokens that see later tokens of their picture, as places in the flattened [B * S]. Each
    picture is reversed, because a causal kernel lets a token see what comes before it."""

    queries_P: Tensor  # each picture without its last token
    keys_P: Tensor  # each picture without its first token
    starts: Tensor  # int32, the first of the P places of each picture, followed by their number
    longest: int  # the most places of a picture

    @staticmethod
    def of_rows(ids_BS: Tensor, tokens: Tokens) -> "PictureTokens":
        """Return the pictures of these rows, whose ids are on the host."""
        is_visual_BS = (ids_BS == tokens.image_id) | (ids_BS == tokens.video_id)
        edges = F.pad(is_visual_BS, (1, 1)).int().diff()
        row_X, begin_X = (edges == 1).nonzero(as_tuple=True)
        _, end_X = (edges == -1).nonzero(as_tuple=True)
        firsts = (row_X * ids_BS.shape[1] + begin_X).tolist()
        counts = (end_X - begin_X - 1).tolist()
        places = [
            torch.arange(first + count - 1, first - 1, -1)
            for first, count in zip(firsts, counts, strict=True)
        ]
        queries_P = torch.cat([torch.zeros(0, dtype=torch.long), *places])
        counts = [count for count in counts if count]
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return PictureTokens(queries_P, queries_P + 1, starts, max(counts, default=0))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PictureTokens":
        """Return them with their tensors moved to the device by `move`."""
        return PictureTokens(
            move(self.queries_P), move(self.keys_P), move(self.starts), self.longest
        )


@dataclass(frozen=True)
class Window:
    """Tokens that a token sees: the last `size` ones, itself included, and the later ones of its
    picture, if any."""

    size: int
    pictures: PictureTokens | None = None


def window_attention(
    query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, window: Window, scale: float | None
) -> Tensor:
    """Return the output [S, B, N * D]. Rows are padded on the right."""
    tokens, rows = query_SBND.shape[:2]
    ends = (rows + 1) * tokens
    starts = torch.arange(0, ends, tokens, dtype=torch.int32, device=query_SBND.device)
    near = _FlashCall(starts, tokens, window.size - 1, scale)
    parts = (x.transpose(0, 1).flatten(0, 1) for x in (query_SBND, key_SBGD, value_SBGD))
    out_TND: Tensor = _WindowAttention.apply(*parts, near, window.pictures)
    return out_TND.unflatten(0, (rows, tokens)).transpose(0, 1).flatten(2)


@dataclass(frozen=True)
class _FlashCall:
    """A call of the kernels for several sequences, in which a token sees itself and `left` tokens
    before it, or with -1 all of them."""

    starts: Tensor
    longest: int
    left: int
    scale: float | None

    def forward(self, *parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exps [N, T] of the scores."""
        out_TND, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
            *parts, *self._lengths, False, **self._seen
        )
        return out_TND, lse_NT

    def backward(self, grad_TND: Tensor, *given: Tensor) -> Sequence[Tensor]:
        """Return the gradients of query, key and value, from these, output and log-sum-exps."""
        no_seed = torch.zeros(2, dtype=torch.uint64, device=grad_TND.device)
        unused = grad_TND.new_empty(0)
        grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            grad_TND, *given, *self._lengths, no_seed, unused, **self._seen
        )
        return grads

    @property
    def _lengths(self) -> tuple[Any, ...]:
        """Sequences of queries and keys, no dropout, and whether it is simply causal."""
        return self.starts, self.starts, self.longest, self.longest, 0.0, self.left < 0

    @property
    def _seen(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.left, "window_size_right": 0}


class _WindowAttention(torch.autograd.Function):
    """Attention `near` each token, and to later tokens of its picture."""

    @staticmethod
    def forward(
        ctx: Any,
        query_TND: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        near: _FlashCall,
        pictures: PictureTokens | None,
    ) -> Tensor:
        parts = query_TND, key_TGD, value_TGD
        out_TND, lse_NT = near.forward(*parts)
        ctx.near, ctx.pictures = near, pictures if pictures and pictures.longest else None
        if ctx.pictures is not None:
            places_P = ctx.pictures.queries_P
            later_PND, later_NP = _later(near, ctx.pictures).forward(*_picked(ctx.pictures, *parts))
            near_NP = lse_NT.index_select(1, places_P)
            both_NP = torch.logaddexp(near_NP, later_NP)
            near_PN1, later_PN1 = ((x - both_NP).exp().T[..., None] for x in (near_NP, later_NP))
            mixed_PND = out_TND.index_select(0, places_P) * near_PN1 + later_PND * later_PN1
            out_TND.index_copy_(0, places_P, mixed_PND.to(out_TND.dtype))
            lse_NT.index_copy_(1, places_P, both_NP)
        ctx.save_for_backward(*parts, out_TND, lse_NT)
        return out_TND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *parts, out_TND, lse_NT = ctx.saved_tensors
        grad_TND = grads[0].contiguous()
        d_query, d_key, d_value = ctx.near.backward(grad_TND, *parts, out_TND, lse_NT)
        if ctx.pictures is not None:
            places_P, keys_P = ctx.pictures.queries_P, ctx.pictures.keys_P
            of_both = out_TND.index_select(0, places_P), lse_NT.index_select(1, places_P)
            later = _later(ctx.near, ctx.pictures).backward(
                grad_TND.index_select(0, places_P), *_picked(ctx.pictures, *parts), *of_both
            )
            # No place occurs twice, so the order of these additions does not matter.
            d_query.index_add_(0, places_P, later[0])
            d_key.index_add_(0, keys_P, later[1])
            d_value.index_add_(0, keys_P, later[2])
        return d_query, d_key, d_value, None, None


def _later(near: _FlashCall, pictures: PictureTokens) -> _FlashCall:
    return _FlashCall(pictures.starts, pictures.longest, -1, near.scale)


def _picked(
    pictures: PictureTokens, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor
) -> tuple[Tensor, ...]:
    """Return queries, keys and values of the call among the tokens of pictures."""
    keys = (x.index_select(0, pictures.keys_P) for x in (key_TGD, value_TGD))
    return query_TND.index_select(0, pictures.queries_P), *keys
