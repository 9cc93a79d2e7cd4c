"""Gated delta net: the mixer of the layers with linear attention, in the place of a self attention.
Its heads are divided over TP.

Megatron's own (0.16) is not used: it needs flash-linear-attention even on a CPU, and leaves the
gradient of its norm unsummed over TP.

Shapes: S tokens (Megatron is sequence first), B rows, H width, X outputs of the first linear, K key
heads and V value heads of this rank, D and E their widths, C channels of the convolution, W tokens
that it sees.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.family.decoder_layers import GatedDeltaNet
from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.delta_rule import DeltaRule, delta_step
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
        **_: Any,
    ):
        """Create the mixer. `rule` computes the gated delta rule."""
        super().__init__(config=config)
        self.rule = rule
        self.layer_number, self.tp = layer_number, pg_collection.tp
        ranks = self.tp.size()
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.value_heads = sizes.value_heads // ranks
        keys, values = sizes.keys // ranks, sizes.values // ranks
        self.mixed = [keys, keys, values]
        self.widths = [sum(self.mixed), values, self.value_heads, self.value_heads]
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(self.widths) * ranks,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            tp_group=self.tp,
        )
        self.conv1d = nn.Parameter(
            torch.empty(sum(self.mixed), 1, sizes.kernel, dtype=config.params_dtype)
        )
        self.A_log = _fp32_parameter(self.value_heads)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=config.params_dtype))
        self.norm = _fp32_parameter(sizes.value_dim)
        self.out_proj = RowParallelLinear(
            sizes.values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp,
        )
        self.context: PassContext | None = None  # the pass sets it

    def forward(
        self, hidden_SBH: Tensor, attention_mask: None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of each row, which begins with an empty state. Padding is on the right and
        changes no token before it."""
        projected_SBX, _bias = self.in_proj(hidden_SBH)
        # Rows first: the convolution and the rule go along the tokens of a row.
        parts = projected_SBX.transpose(0, 1).split(self.widths, dim=-1)
        mixed_BSC, gate_BSX, beta_BSV, a_BSV = parts
        beta_BSV = beta_BSV.float().sigmoid()
        decay_BSV = -self.A_log.exp() * F.softplus(a_BSV.float() + self.dt_bias.float())
        cache = None if self.context is None else self.context.cache
        if cache is None:
            out_BSVE, _state = self._rule(_convolve(mixed_BSC, self.conv1d), decay_BSV, beta_BSV)
        elif cache.in_prefill:
            out_BSVE = self._prefill(cache, mixed_BSC, decay_BSV, beta_BSV)
        else:
            out_BSVE = self._decode(cache, mixed_BSC, decay_BSV, beta_BSV)
        gated_BSX = self._gated_norm(out_BSVE, gate_BSX)
        return self.out_proj(gated_BSX.transpose(0, 1).contiguous())

    def _rule(
        self, mixed_BSC: Tensor, decay_BSV: Tensor, beta_BSV: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.rule(*self._heads(mixed_BSC), decay_BSV, beta_BSV)

    def _heads(self, mixed_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = mixed_BSC.split(self.mixed, dim=-1)
        by_key, by_value = (-1, self.key_dim), (-1, self.value_dim)
        return query.unflatten(-1, by_key), key.unflatten(-1, by_key), value.unflatten(-1, by_value)

    def _gated_norm(self, out_BSVE: Tensor, gate_BSX: Tensor) -> Tensor:
        """Normalise each head, then apply its gate. Each rank sees only its own heads, so the
        weight's gradient is a sum over TP."""
        weight_E = copy_to_tensor_model_parallel_region(self.norm, group=self.tp)
        dtype, eps = out_BSVE.dtype, self.config.layernorm_epsilon
        normed_BSVE = F.rms_norm(out_BSVE.float(), (self.value_dim,), None, eps).to(dtype)
        normed_BSVE = weight_E.to(dtype) * normed_BSVE
        gate_BSVE = gate_BSX.unflatten(-1, (-1, self.value_dim))
        return (normed_BSVE * F.silu(gate_BSVE.float())).to(dtype).flatten(2)

    def _prefill(
        self, cache: KVCache, mixed_BSC: Tensor, decay_BSV: Tensor, beta_BSV: Tensor
    ) -> Tensor:
        """Mix prompts and store their states, which padding neither decays nor is written into."""
        real_BS1 = cache.real_tokens(mixed_BSC.shape[1])[..., None]
        seen, number = self.conv1d.shape[-1] - 1, self.layer_number
        given = decay_BSV * real_BS1, beta_BSV * real_BS1
        if cache.before:
            seen_BWC, state_BVDE = cache.states[number]
            window_BSC = torch.cat([seen_BWC, mixed_BSC], dim=1)
            heads = self._heads(_convolve(window_BSC, self.conv1d)[:, seen:])
            out_BSVE, state_BVDE = self.rule(*heads, *given, state_BVDE)
            cache.states[number] = (window_BSC[:, window_BSC.shape[1] - seen :], state_BVDE)
            return out_BSVE
        out_BSVE, state_BVDE = self._rule(_convolve(mixed_BSC, self.conv1d), *given)
        cache.states[number] = (cache.newest_tokens(mixed_BSC, seen), state_BVDE)
        return out_BSVE

    def _decode(
        self, cache: KVCache, mixed_B1C: Tensor, decay_B1V: Tensor, beta_B1V: Tensor
    ) -> Tensor:
        """Mix one new token of each row."""
        seen_BWC, state_BVDE = cache.states[self.layer_number]
        window_BWC = torch.cat([seen_BWC, mixed_B1C], dim=1)
        convolved_B1C = _convolve(window_BWC, self.conv1d)[:, -1:]
        query, key, value = (part[:, 0] for part in self._heads(convolved_B1C))
        decay_BV, beta_BV = decay_B1V[:, 0], beta_B1V[:, 0]
        out_BVE, state_BVDE = delta_step(query, key, value, decay_BV, beta_BV, state_BVDE)
        cache.states[self.layer_number] = (window_BWC[:, 1:], state_BVDE)
        return out_BVE[:, None]


def _convolve(x_BSC: Tensor, weight_C1W: Tensor) -> Tensor:
    """Apply the causal convolution of each channel, and SiLU. Rows begin with zeros."""
    channels, _, width = weight_C1W.shape
    x_BCS = F.pad(x_BSC.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(x_BCS, weight_C1W, groups=channels)).transpose(1, 2)
