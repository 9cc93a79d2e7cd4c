"""Gated delta net: the mixer of the layers with linear attention, in the place of a self attention.
Its heads are divided over TP.

Megatron's own (0.16) is not used: it needs flash-linear-attention even on a CPU, and leaves the
gradient of its norm unsummed over TP.

Shapes: S tokens (Megatron is sequence first), B rows, H width, X outputs of the first linear, K key
heads and V value heads of this rank, D and E their widths, W tokens that the convolution
sees before one.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.family.decoder_layers import GatedDeltaNet
from megatron_vlm.model.decoder_layer import PassContext, mixer_linears
from megatron_vlm.model.delta_rule import DeltaRule, delta_step
from megatron_vlm.model.fused_ops import FusedOps
from megatron_vlm.model.kv_cache import KVCache


def _fp32_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter that stays in fp32 beside weights in bf16, as released checkpoints have
    it."""
    param = nn.Parameter(torch.empty(shape, dtype=torch.float))
    param.keeps_fp32 = True  # type: ignore[attr-defined]
    return param


def keeps_fp32(param: nn.Parameter) -> bool:
    """Return whether a parameter stays in fp32 where weights are in bf16."""
    return getattr(param, "keeps_fp32", False)


class GatedDeltaMixer(MegatronModule):
    """Projections, causal convolution, gated delta rule and gated norm; weights are unset."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: GatedDeltaNet,
        pg_collection: Any,
        rule: DeltaRule,
        chains: FusedOps,
        **_: Any,
    ):
        """Create the mixer. `rule` computes the gated delta rule."""
        super().__init__(config=config)
        self.rule, self.chains = rule, chains
        self.layer_number, self.tp = layer_number, pg_collection.tp
        ranks = self.tp.size()
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.value_heads = sizes.value_heads // ranks
        keys, values = sizes.keys // ranks, sizes.values // ranks
        self.mixed = (keys, keys, values)
        outputs = sum(self.mixed) + values + 2 * self.value_heads
        self.in_proj, last = mixer_linears(config, outputs * ranks, sizes.values, self.tp)
        self.conv1d = nn.Parameter(
            torch.empty(sum(self.mixed), 1, sizes.kernel, dtype=config.params_dtype)
        )
        self.A_log = _fp32_parameter(self.value_heads)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=config.params_dtype))
        self.norm = _fp32_parameter(sizes.value_dim)
        self.out_proj = last  # parameters are in the order in which they are set
        self.context: PassContext | None = None  # the pass sets it

    def forward(
        self, hidden_SBH: Tensor, attention_mask: None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of each row, which begins with an empty state. Padding is on the right and
        changes no token before it."""
        projected_SBX, _bias = self.in_proj(hidden_SBH)
        cache = None if self.context is None else self.context.cache
        if cache is not None and not cache.in_prefill:
            out_BSVE, gate_BSX = self._decode(cache, projected_SBX)
        else:
            out_BSVE, gate_BSX = self._mix_rows(cache, projected_SBX)
        return self.out_proj(self._gated_norm(out_BSVE, gate_BSX))

    def _inputs(self, projected_SBX: Tensor) -> tuple[Tensor, ...]:
        weights = self.conv1d.squeeze(1), self.A_log, self.dt_bias
        widths = self.mixed, self.key_dim, self.value_dim
        return self.chains.delta_inputs(projected_SBX, *weights, *widths)

    def _mix_rows(self, cache: KVCache | None, projected_SBX: Tensor) -> tuple[Tensor, Tensor]:
        """Mix all tokens, and store the states of prompts. Return the outputs and their gate."""
        if cache is None:
            *inputs, gate_BSX, decay_BSV, beta_BSV = self._inputs(projected_SBX)
            return self.rule(*inputs, decay_BSV, beta_BSV)[0], gate_BSX
        seen, tokens, begun = self.conv1d.shape[-1] - 1, len(projected_SBX), list[Tensor]()
        if cache.before:  # the convolution reaches back into the pass before
            seen_BWX, *begun = cache.states[self.layer_number]
            projected_SBX = torch.cat([seen_BWX.transpose(0, 1), projected_SBX])
        every = [each[:, -tokens:] for each in self._inputs(projected_SBX)]
        *inputs, gate_BSX, decay_BSV, beta_BSV = every
        # Padding neither decays a state nor is written into it.
        real_BS1 = cache.real_tokens(tokens)[..., None]
        given = *inputs, decay_BSV * real_BS1, beta_BSV * real_BS1
        out_BSVE, state_BVDE = self.rule(*given, *begun)
        newest_BWX = projected_SBX[-seen:].transpose(0, 1).clone()  # a view would keep the whole
        if not cache.before:
            newest_BWX = cache.newest_tokens(projected_SBX.transpose(0, 1), seen)
        cache.states[self.layer_number] = (newest_BWX, state_BVDE)
        return out_BSVE, gate_BSX

    def _gated_norm(self, out_BSVE: Tensor, gate_BSX: Tensor) -> Tensor:
        """Normalise and gate each head. Each rank sees only its own heads, so the weight's gradient
        is a sum over TP."""
        weight_E = copy_to_tensor_model_parallel_region(self.norm, group=self.tp)
        eps = self.config.layernorm_epsilon
        return self.chains.delta_outputs(out_BSVE, gate_BSX, weight_E, eps)

    def _decode(self, cache: KVCache, projected_1BX: Tensor) -> tuple[Tensor, Tensor]:
        """Mix one new token of each row. Return the outputs and their gate."""
        seen_BWX, state_BVDE = cache.states[self.layer_number]
        window_BWX = torch.cat([seen_BWX, projected_1BX.transpose(0, 1)], dim=1)
        inputs = [each[:, -1] for each in self._inputs(window_BWX.transpose(0, 1))]
        query, key, value, gate_BX, decay_BV, beta_BV = inputs
        out_BVE, state_BVDE = delta_step(query, key, value, decay_BV, beta_BV, state_BVDE)
        cache.states[self.layer_number] = (window_BWX[:, 1:], state_BVDE)
        return out_BVE[:, None], gate_BX[:, None]
