"""Attention of the decoder: the `torch` backend over scaled_dot_product_attention, for CPU and GPU,
and the KV cache of generation around any backend.

Shapes: S tokens (Megatron is sequence first), B rows, H width, N query heads, G key/value heads, R
query heads per key/value head, D head size, F rotated pairs of a head, Q outputs of the first
linear, T columns of the cache.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.family.cpu_matmul import with_mkl
from megatron_vlm.family.decoder_layers import Attention
from megatron_vlm.family.flash_attention import TORCH, is_flash, prefer_kernel
from megatron_vlm.family.spec import Tokens
from megatron_vlm.family.tower_attention import takes_lengths
from megatron_vlm.model.attention_kernels import as_added, attend
from megatron_vlm.model.decoder_layer import PassContext, mixer_linears
from megatron_vlm.model.flash_windows import Window, window_attention
from megatron_vlm.model.fused_ops import FusedOps, Norm, gate_output

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


class UnscaledSelfAttention(MegatronModule):
    """Projections, norms, rotary embedding, attention without a scale, and the norm of its output.
    Heads have one size and number in layers with a window, and others in layers without: Megatron's
    own takes both from the one config of a model, always makes a value, and has no norm of
    values."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: Attention,
        pg_collection: Any,
        chains: FusedOps,
        kernels: Mapping[Any, str],
        rotary_span: tuple[int, int],
        tokens: Tokens,
        **_: Any,
    ):
        """Create it with unset weights. `rotary_span` is the place of its cos and sin."""
        super().__init__(config=config)
        self.sizes, self.span, self.tokens, tp = sizes, rotary_span, tokens, pg_collection.tp
        self.chains = chains
        self.groups = sizes.kv_heads // tp.size()
        outputs = sizes.query + (1 if sizes.values_are_keys else 2) * sizes.kv
        self.linear_qkv, self.linear_proj = mixer_linears(config, outputs, sizes.query, tp)
        eps = config.layernorm_epsilon
        # Megatron sums the gradients of parameters with these two names over TP.
        self.q_layernorm = Norm(chains, sizes.head_dim, eps)
        self.k_layernorm = Norm(chains, sizes.head_dim, eps)
        self.post_norm = Norm(chains, config.hidden_size, eps)
        core = partial(SDPACoreAttention, kernels=kernels, kind=sizes)
        self.core_attention = CachedAttention(
            core, config, layer_number, softmax_scale=1.0, window=sizes.window
        )
        self.kernels = kernels
        self.recompute = config.recompute_granularity == "selective"

    def forward(
        self, hidden_SBH: Tensor, attention_mask: None = None, *, rotary_pos_emb: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend, and return the weight of the output's norm as well, for `norm_and_add` of
        model/layer_specs.py. `rotary_pos_emb` [2, S, B, F of all kinds] is cos and sin of the
        positions."""
        mixed_SBQ, _bias = self.linear_qkv(hidden_SBH)
        first, last = self.span
        heads = self._heads(mixed_SBQ, *rotary_pos_emb[..., first:last])
        window, core = self._window(heads[0]), cast(Any, self.core_attention)
        mask = self._mask(hidden_SBH.dtype) if window is None else None
        attend = partial(core, window=window)
        if self.recompute and self.training and torch.is_grad_enabled():
            out_SBQ = checkpoint(attend, False, *heads, mask)
        else:
            out_SBQ = attend(*heads, mask)
        out_SBH, _bias = self.linear_proj(out_SBQ)
        return out_SBH, self.post_norm.weight

    def _heads(
        self, mixed_SBQ: Tensor, cos_SBF: Tensor, sin_SBF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.q_layernorm.weight, self.k_layernorm.weight
        last = self.groups, 0 if self.sizes.values_are_keys else 1, self.q_layernorm.eps
        return self.chains.unscaled_heads(mixed_SBQ, cos_SBF, sin_SBF, *weights, *last)

    def _window(self, query_SBND: Tensor) -> Window | None:
        """Return the window of this pass, if FlashAttention computes it without a mask."""
        masked, pictures = self._masked(), self._context.pictures
        if masked is None or self._before or not takes_lengths(query_SBND):
            return None
        window, sees_image = masked
        # A caller may not know the pictures on the host.
        is_known = not sees_image or pictures is not None
        if not is_known or not is_flash(self.kernels[self.sizes, True]):
            return None
        return Window(window, pictures if sees_image else None)

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of this pass, or None where attention is causal or reads the cache."""
        key, context = self._masked(), self._context
        if key is None:
            return None
        if key not in context.masks:
            sees_B1ST = window_mask(context.ids_BS, self.tokens, *key, self._before)
            context.masks[key] = as_added(sees_B1ST, dtype)
        return context.masks[key]

    def _masked(self) -> tuple[int, bool] | None:
        """Return the window of this pass and whether images see both ways, or None where attention
        is causal or reads the cache. What decides is known on the host, which does not wait for the
        device."""
        context, window = self._context, self.sizes.window
        in_decode = context.cache is not None and not context.cache.in_prefill
        sees_image = self.sizes.sees_image and context.has_visuals
        if window is None or in_decode:
            return None
        is_masked = needs_mask(self._before + context.ids_BS.shape[1], window, sees_image)
        return (window, sees_image) if is_masked else None

    @property
    def _before(self) -> int:
        cache = self._context.cache
        return 0 if cache is None else cache.before

    @property
    def _context(self) -> PassContext:
        context: PassContext | None = self.core_attention.context
        assert context is not None
        return context


def needs_mask(tokens: int, window: int, sees_image: bool) -> bool:
    """Return whether rows of this length need the mask of a window. Else attention is causal."""
    return sees_image or tokens > window


def window_mask(
    ids_BS: Tensor, tokens: Tokens, window: int, sees_image: bool, before: int = 0
) -> Tensor:
    """Return which tokens [B, 1, S, T] a token sees: the last `window`, and the later ones of its
    image. The images of a row never touch, since tokens of text are around each. T are these tokens
    and the ones `before`, which have none of their images."""
    keys_1T = torch.arange(before + ids_BS.shape[1], device=ids_BS.device)[None]
    queries_S1 = keys_1T.T[before:]
    sees_BST = (keys_1T <= queries_S1)[None]
    if sees_image:
        is_visual_BS = (ids_BS == tokens.image_id) | (ids_BS == tokens.video_id)
        begins_BS = is_visual_BS & ~F.pad(is_visual_BS[:, :-1], (1, 0))
        image_BS = begins_BS.cumsum(1)
        same_BSS = image_BS[:, :, None] == image_BS[:, None]
        same_BSS = same_BSS & is_visual_BS[:, :, None] & is_visual_BS[:, None]
        sees_BST = sees_BST | F.pad(same_BSS, (before, 0))
    # Every token, also of padding, sees itself: a softmax over no key at all would be NaN.
    return (sees_BST & (keys_1T > queries_S1 - window))[:, None]
