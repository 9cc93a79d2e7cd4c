"""Feed-forward networks with a norm of their output: an MLP, or an MLP beside experts.

Shapes: S tokens of a row, B rows, H width, N tokens without padding, K experts per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.family.decoder_layers import Experts
from megatron_vlm.model.experts import ExpertMLP
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.megatron_versions import LayerMLP
from megatron_vlm.model.router import Routing, route


class PostNormMLP(LayerMLP):
    """Megatron's MLP, and the norm of its output, which `norm_and_add` of model/layer_specs.py
    applies."""

    def __init__(self, config: TransformerConfig, *args: Any, chains: FusedOps, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_norm = Norm(chains, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_SBH: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out_SBH, _bias = super().forward(hidden_SBH, *args, **kwargs)
        return out_SBH, self.post_norm.weight


class MLPBesideExperts(ExpertMLP):
    """An MLP and experts, each with norms of their own. It reads the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device,
        chains: FusedOps,
        sizes: Experts,
        **kwargs: Any,
    ):
        super().__init__(config, device=device, chains=chains, sizes=sizes, **kwargs)
        self.activation = chains.geglu
        hidden, eps, dtype = config.hidden_size, config.layernorm_epsilon, config.params_dtype
        self.eps = eps

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.utils.skip_init(
                nn.Linear, inputs, outputs, bias=False, device=device, dtype=dtype
            )

        width = sizes.dense_width
        parts = {"gate_up": linear(hidden, 2 * width), "down": linear(width, hidden)}
        self.dense = nn.ModuleDict(parts)
        self.router_scale = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.expert_scale = nn.Parameter(torch.empty(sizes.count, device=device, dtype=dtype))
        for name in ("pre_norm", "dense_norm", "input_norm", "experts_norm", "post_norm"):
            setattr(self, name, Norm(chains, hidden, eps))

    def mix(self, hidden_NH: Tensor, routing: Routing) -> Tensor:
        """Return the norm of the sum of the MLP's output and that of each token's experts."""
        gated_NI = self.activation(self.dense["gate_up"](self.pre_norm(hidden_NH)))
        dense_NH = self.dense["down"](gated_NI)
        width = hidden_NH.shape[-1]
        router_NH = F.rms_norm(hidden_NH, (width,), None, self.eps)
        router_NH = router_NH * self.router_scale * width**-0.5
        chosen_NK, weights_NK = route(router_NH, self.router, self.top_k, routing, self.layer)
        weights_NK = weights_NK * self.expert_scale[chosen_NK]
        of_experts = self.input_norm(hidden_NH), chosen_NK, weights_NK, routing
        experts_NH = self.weighted_sum(*of_experts)
        out_NH: Tensor = self.post_norm(self.dense_norm(dense_NH) + self.experts_norm(experts_NH))
        return out_NH
