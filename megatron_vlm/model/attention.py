"""Core attention over torch's scaled_dot_product_attention: the `torch` backend, on CPU and GPU.

Shapes: S tokens (Megatron is sequence first), B rows, N query heads, G key/value heads, R query
heads of each, D head size, T columns of the cache.
"""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vlm.model.cache import KVCache


class SDPACoreAttention(MegatronModule):
    """Causal attention without a mask: rows are padded on the right, where it changes nothing.

    Where Megatron would hand over a mask comes the cache of generation, None in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        cache: KVCache | None = None,
        **_: Any,
    ) -> Tensor:
        if cache is not None:
            kept = cache.store(self.layer_number, key_SBGD, value_SBGD)
            if not cache.in_prefill:
                return self._attend_to_cache(query_SBND[0], *kept, cache.mask_B11T)
        out_BNSD = F.scaled_dot_product_attention(
            query_SBND.permute(1, 2, 0, 3),
            key_SBGD.permute(1, 2, 0, 3),
            value_SBGD.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_SBND.shape[2] != key_SBGD.shape[2],
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _attend_to_cache(
        self, query_BND: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, mask_B11T: Tensor | None
    ) -> Tensor:
        """One new token a row. Alone it has no causal order, so the query heads that share a
        key/value head stand in the place of tokens, and no key is copied for each of them."""
        out_BGRD = F.scaled_dot_product_attention(
            query_BND.unflatten(1, (key_BTGD.shape[2], -1)),
            key_BTGD.transpose(1, 2),
            value_BTGD.transpose(1, 2),
            attn_mask=mask_B11T,
            scale=self.softmax_scale,
        )
        return out_BGRD.flatten(1)[None]
