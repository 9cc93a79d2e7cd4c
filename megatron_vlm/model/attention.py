"""Attention of the decoder: the `torch` backend over scaled_dot_product_attention, for CPU and GPU,
and the KV cache of generation around any backend.

Shapes: S tokens (Megatron is sequence first), B rows, H width, N query heads, G key/value heads, R
query heads per key/value head, D head size, F half the head size, Q outputs of the first linear, T
columns of the cache.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.family.cpu_matmul import with_mkl
from megatron_vlm.family.decoder_layers import Attention
from megatron_vlm.family.flash_attention import TORCH, prefer_kernel
from megatron_vlm.model.attention_kernels import as_added, attend
from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.flash_windows import Window, window_attention
from megatron_vlm.model.fused_ops import FusedOps, gate_output

_PREFIX = "prefix"  # mask of a pass that continues a prompt


class FusedSelfAttention(SelfAttention):
    """Megatron's self attention, with all operations between its first linear and its core
    attention fused into one chain."""

    def __init__(self, *args: Any, chains: FusedOps, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.chains = chains

    def forward(  # type: ignore[override]
        self, hidden_SBH: Tensor, attention_mask: None = None, *, rotary_pos_emb: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with `rotary_pos_emb` [2, S, B, F] as the cos and sin of the positions."""
        mixed_SBQ, _bias = self.linear_qkv(hidden_SBH)
        is_gated = self.config.attention_output_gate
        make_heads = self.chains.gated_heads if is_gated else self.chains.heads
        query, key, value, *gate = make_heads(
            mixed_SBQ,
            *rotary_pos_emb,
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
        )
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        out_SBQ = attend(query, key, value, attention_mask)
        return self.linear_proj(gate_output(out_SBQ, *gate) if gate else out_SBQ)


class SDPACoreAttention(MegatronModule):
    """Attention among the tokens of a pass, causal without a mask or a window. `kernels` has the
    kernel of each kind of attention, in causal passes and in others. A run that resumes may change
    it."""

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        kernels: Mapping[Any, str] | None = None,
        kind: Attention | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.softmax_scale, self.kind = softmax_scale, kind
        self.kernels: Mapping[Any, str] = kernels or {(None, False): TORCH}

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        mask_B1SS: Tensor | None = None,
        window: Window | None = None,
        **_: Any,
    ) -> Tensor:
        if window is not None:
            heads = query_SBND, key_SBGD, value_SBGD
            return window_attention(*heads, window, self.softmax_scale)
        compute = partial(attend, mask_B1SS=mask_B1SS, scale=self.softmax_scale)
        parts = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        with prefer_kernel(self.kernels[self.kind, mask_B1SS is not None]):
            out_BNSD = with_mkl(compute, *parts)
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


class CachedAttention(MegatronModule):
    """A backend's core attention and, in generation, the KV cache. The backend attends among the
    tokens of the prompt; every later token attends to the cache, or with a `window` to the cache's
    newest tokens, itself included."""

    def __init__(
        self,
        backend: Callable[..., nn.Module],
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        window: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(config=config)
        self.layer_number, self.window = layer_number, window
        self.softmax_scale = softmax_scale
        self.backend = backend(
            config=config, layer_number=layer_number, softmax_scale=softmax_scale, **kwargs
        )
        self.context: PassContext | None = None  # the pass sets it

    def forward(
        self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        cache = None if self.context is None else self.context.cache
        if cache is not None:
            cached = cache.store(self.layer_number, key_SBGD, value_SBGD)
            if not cache.in_prefill:
                mask_B11T = cache.mask_of(self.window)
                return self._attend_to_cache(query_SBND[0], *cached, mask_B11T)
            if cache.before:
                mask_B1ST = args[0] if args else None
                return self._attend_to_prefix(query_SBND, *cached, mask_B1ST)
        out_SBH: Tensor = self.backend(query_SBND, key_SBGD, value_SBGD, *args, **kwargs)
        return out_SBH

    def _attend_to_prefix(
        self, query_SBND: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, mask_B1ST: Tensor | None
    ) -> Tensor:
        """Attend from the tokens of a prompt's later pass to the cache, causally without a mask."""
        if mask_B1ST is None:
            assert self.context is not None
            masks, tokens, columns = self.context.masks, len(query_SBND), key_BTGD.shape[1]
            if _PREFIX not in masks:
                all_ST = query_SBND.new_ones(tokens, columns, dtype=torch.bool)
                sees_11ST = all_ST.tril(columns - tokens)[None, None]
                masks[_PREFIX] = as_added(sees_11ST, query_SBND.dtype)
            mask_B1ST = masks[_PREFIX]
        compute = partial(attend, mask_B1SS=mask_B1ST, scale=self.softmax_scale)
        heads = query_SBND.permute(1, 2, 0, 3), key_BTGD.transpose(1, 2), value_BTGD.transpose(1, 2)
        return with_mkl(compute, *heads).permute(2, 0, 1, 3).flatten(2)

    def _attend_to_cache(
        self, query_BND: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, mask_B11T: Tensor | None
    ) -> Tensor:
        """Attend from one new token per row to the cache. A single token has no causal order, so
        the query heads that share a key/value head take the place of tokens, and no key is
        copied."""
        attend = partial(
            F.scaled_dot_product_attention, attn_mask=mask_B11T, scale=self.softmax_scale
        )
        out_BGRD = with_mkl(
            attend,
            query_BND.unflatten(1, (key_BTGD.shape[2], -1)),
            key_BTGD.transpose(1, 2),
            value_BTGD.transpose(1, 2),
        )
        return out_BGRD.flatten(1)[None]
