"""Core attention over torch's scaled_dot_product_attention: the `torch` backend, on CPU and GPU.

Shapes: S tokens (Megatron is sequence first), B rows, N query heads, G key/value heads,
D head size.
"""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SDPACoreAttention(MegatronModule):
    """Causal attention without a mask: rows are padded on the right, where it changes nothing."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        out_BNSD = F.scaled_dot_product_attention(
            query_SBND.permute(1, 2, 0, 3),
            key_SBGD.permute(1, 2, 0, 3),
            value_SBGD.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_SBND.shape[2] != key_SBGD.shape[2],
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)
