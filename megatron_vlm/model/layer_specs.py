"""Decoder layer as Megatron's ModuleSpec: the class that fills each place, for each backend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import Experts, GatedDeltaNet, LayerSpec
from megatron_vlm.family.spec import TextSizes
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.model.attention import CachedAttention, FusedSelfAttention, SDPACoreAttention
from megatron_vlm.model.decoder_layer import DecoderLayer
from megatron_vlm.model.delta_kernels import DeltaRule
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.gated_delta_net import GatedDeltaMixer
from megatron_vlm.model.megatron_versions import ChainActivation, LayerMLP, LayerPart


@dataclass(frozen=True)
class BuildOptions:
    """Choices that all layers of a model share. Transformer Engine has attention and norms of its
    own in place of `kernel` and `chains`."""

    backend: str
    chains: FusedOps
    kernel: str  # for attention
    expert_mlp: LayerPart
    delta_rule: DeltaRule | None = None


def _norm(options: BuildOptions, text: TextSizes) -> Any:
    if BACKENDS[options.backend].fuses_norms:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    params = {"chains": options.chains, "centered": text.centered_norms}
    return ModuleSpec(module=Norm, params=params)


def torch_layer_spec(options: BuildOptions, text: TextSizes) -> ModuleSpec:
    """Return Megatron's parallel linears around torch's attention and chains of small
    operations."""
    chains, norm = options.chains, _norm(options, text)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(CachedAttention, partial(SDPACoreAttention, kernel=options.kernel)),
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        activation_func=ModuleSpec(ChainActivation, {"chain": chains.swiglu}),
        linear_fc2=RowParallelLinear,
    )
    return ModuleSpec(
        module=DecoderLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=FusedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "chains": chains},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=LayerPart(LayerMLP, {"submodules": mlp}),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def te_layer_spec() -> ModuleSpec:
    """Return Megatron's Transformer Engine layer, with DeepStack."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"needs Transformer Engine, which does not import here ({error})",
            key="model.backend",
            found="te",
            remedy="install it as docs/install.md describes, or set model.backend=torch",
        ) from error
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = partial(CachedAttention, attention.core_attention)
    return replace(spec, module=DecoderLayer)


def block_spec(
    options: BuildOptions, text: TextSizes, layers: Sequence[LayerSpec]
) -> TransformerBlockSubmodules:
    """Return these decoder layers of one stage, and the norm that follows the model's last one."""
    norm = _norm(options, text)
    is_te = BACKENDS[options.backend].fuses_norms
    base = te_layer_spec() if is_te else torch_layer_spec(options, text)

    def spec_of(layer: LayerSpec) -> ModuleSpec:
        parts: dict[str, Any] = {}
        if isinstance(layer.mixer, GatedDeltaNet):
            parts["self_attention"] = ModuleSpec(
                module=GatedDeltaMixer, params={"sizes": layer.mixer, "rule": options.delta_rule}
            )
        if isinstance(layer.ffn, Experts):
            # Transformer Engine's dense layer has the norm inside the MLP's first linear layer.
            parts |= {"pre_mlp_layernorm": norm, "mlp": options.expert_mlp}
        return replace(base, submodules=replace(base.submodules, **parts))

    return TransformerBlockSubmodules([spec_of(layer) for layer in layers], layer_norm=norm)
