"""Attention without a scale: heads of one size and number in layers with a window, and of others in
layers without. Megatron's own takes both from the one config of a model, always makes a value, and
has no norm of values.

Shapes: S tokens (Megatron is sequence first), B rows, T columns of the cache, H width, N query
heads, G key heads of this rank, D head size, F rotated pairs of a head, Q outputs of the first
linear."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vlm.family.decoder_layers import Attention
from megatron_vlm.family.flash_attention import is_flash
from megatron_vlm.family.spec import Tokens
from megatron_vlm.family.tower_attention import takes_lengths
from megatron_vlm.model.attention import CachedAttention, SDPACoreAttention
from megatron_vlm.model.attention_kernels import as_added
from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.flash_windows import Window
from megatron_vlm.model.fused_ops import FusedOps, Norm


class UnscaledSelfAttention(MegatronModule):
    """Projections, norms, rotary embedding, attention, and the norm of its output."""

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
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            outputs,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            tp_group=tp,
        )
        self.linear_proj = RowParallelLinear(
            sizes.query,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp,
        )
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
