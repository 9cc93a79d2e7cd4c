"""Decoder layer as Megatron's ModuleSpec: the class that fills each place, for each backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import (
    Attention,
    DenseMLP,
    Experts,
    FullAttention,
    GatedDeltaNet,
    LayerSpec,
)
from megatron_vlm.family.spec import TextSizes, Tokens
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.model.attention import (
    CachedAttention,
    FusedSelfAttention,
    SDPACoreAttention,
    UnscaledSelfAttention,
)
from megatron_vlm.model.decoder_layer import DecoderLayer, ScaledDecoderLayer
from megatron_vlm.model.delta_rule import DeltaRule
from megatron_vlm.model.experts import ExpertMLP, MLPBesideExperts, PostNormMLP
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.gated_delta_net import GatedDeltaMixer
from megatron_vlm.model.megatron_versions import ChainActivation, LayerMLP, LayerPart
from megatron_vlm.model.rope import rotary_spans


@dataclass(frozen=True)
class BuildOptions:
    """Choices that all layers of a model share. Transformer Engine has attention and norms of its
    own in place of `kernels` and `chains`."""

    backend: str
    chains: FusedOps
    kernels: Mapping[Any, str]  # for each kind of attention, masked or not
    expert_group: dist.ProcessGroup
    unset_on: torch.device  # device of the unset weights of experts
    tokens: Tokens
    delta_rule: DeltaRule | None = None


def _norm(options: BuildOptions, text: TextSizes) -> Any:
    if BACKENDS[options.backend].fuses_norms:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    params = {"chains": options.chains, "centered": text.centered_norms}
    return ModuleSpec(module=Norm, params=params)


# A function that returns the places of a layer that a part fills, and with what, from the part's
# description.
Builder = Callable[[BuildOptions, TextSizes, Any], dict[str, Any]]


def _attention(options: BuildOptions, text: TextSizes, attention: FullAttention) -> dict[str, Any]:
    norm = _norm(options, text)
    core = partial(SDPACoreAttention, kernels=options.kernels, kind=attention)
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(CachedAttention, core),
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    params = {"attn_mask_type": AttnMaskType.causal, "chains": options.chains}
    return {"self_attention": ModuleSpec(FusedSelfAttention, params, submodules)}


def _delta_net(options: BuildOptions, _: TextSizes, net: GatedDeltaNet) -> dict[str, Any]:
    params = {"sizes": net, "rule": options.delta_rule, "chains": options.chains}
    return {"self_attention": ModuleSpec(GatedDeltaMixer, params)}


def _mlp_submodules(activation: Callable[[Tensor], Tensor]) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        activation_func=ModuleSpec(ChainActivation, {"chain": activation}),
        linear_fc2=RowParallelLinear,
    )


def _dense_mlp(options: BuildOptions, _: TextSizes, mlp: DenseMLP) -> dict[str, Any]:
    submodules = _mlp_submodules(options.chains.swiglu)
    return {"mlp": LayerPart(LayerMLP, {"submodules": submodules})}


def _expert_part(module: type[ExpertMLP], options: BuildOptions, experts: Experts) -> LayerPart:
    params = {"group": options.expert_group, "device": options.unset_on, "sizes": experts}
    return LayerPart(module, {"chains": options.chains, **params})


def _experts(options: BuildOptions, text: TextSizes, experts: Experts) -> dict[str, Any]:
    mlp = _expert_part(ExpertMLP, options, experts)
    # Transformer Engine's dense layer has the norm inside the MLP's first linear layer.
    return {"pre_mlp_layernorm": _norm(options, text), "mlp": mlp}


def norm_and_add(options: BuildOptions, text: TextSizes) -> Callable[..., Any]:
    """Return what adds a part's output to its residual, in the place of Megatron's function, which
    takes a bias where this one takes the weight of the output's norm."""

    def add(given: tuple[Tensor, Tensor], residual_SBH: Tensor, _dropout: float) -> Tensor:
        return options.chains.norm(*given, text.norm_eps, residual_SBH)

    return lambda *_: add


def _unscaled_attention(
    options: BuildOptions, text: TextSizes, attention: Attention
) -> dict[str, Any]:
    params = {
        "sizes": attention,
        "chains": options.chains,
        "kernels": options.kernels,
        "rotary_span": rotary_spans(text)[attention],
        "tokens": options.tokens,
    }
    mixer = ModuleSpec(UnscaledSelfAttention, params)
    return {"self_attention": mixer, "self_attn_bda": norm_and_add(options, text)}


def _normed_mlp(options: BuildOptions, text: TextSizes, mlp: DenseMLP) -> dict[str, Any]:
    submodules = _mlp_submodules(options.chains.geglu)
    params = {"submodules": submodules, "chains": options.chains}
    return {
        "pre_mlp_layernorm": _norm(options, text),
        "mlp": LayerPart(PostNormMLP, params),
        "mlp_bda": norm_and_add(options, text),
    }


def _experts_beside_mlp(options: BuildOptions, _: TextSizes, experts: Experts) -> dict[str, Any]:
    mlp = _expert_part(MLPBesideExperts, options, experts)
    return {"pre_mlp_layernorm": IdentityOp, "mlp": mlp}  # its parts have norms of their own


# The builder of each kind of part, and the class of each kind of layer.
BUILDERS: dict[str, Builder] = {
    "attention": _attention,
    "delta_net": _delta_net,
    "mlp": _dense_mlp,
    "experts": _experts,
    "unscaled_attention": _unscaled_attention,
    "normed_mlp": _normed_mlp,
    "experts_beside_mlp": _experts_beside_mlp,
}
LAYER_MODULES = {"plain": DecoderLayer, "scaled": ScaledDecoderLayer}


def _te_submodules() -> TransformerLayerSubmodules:
    """Return the parts of Megatron's Transformer Engine layer."""
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

    submodules: TransformerLayerSubmodules = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=True
    ).submodules
    attention = submodules.self_attention.submodules
    attention.core_attention = partial(CachedAttention, attention.core_attention)
    return submodules


def block_spec(
    options: BuildOptions, text: TextSizes, layers: Sequence[LayerSpec]
) -> TransformerBlockSubmodules:
    """Return these decoder layers of one stage, and the norm that follows the model's last one."""
    norm, builders = _norm(options, text), BUILDERS
    if BACKENDS[options.backend].fuses_norms:
        base, builders = _te_submodules(), {"experts": _experts}
    else:
        add = get_bias_dropout_add
        base = TransformerLayerSubmodules(
            input_layernorm=norm, self_attn_bda=add, pre_mlp_layernorm=norm, mlp_bda=add
        )

    def spec_of(layer: LayerSpec) -> ModuleSpec:
        parts: dict[str, Any] = {}
        for part in (layer.mixer, layer.ffn):
            if (build := builders.get(part.kind)) is not None:
                parts |= build(options, text, part)
        return ModuleSpec(LAYER_MODULES[layer.kind], submodules=replace(base, **parts))

    return TransformerBlockSubmodules([spec_of(layer) for layer in layers], layer_norm=norm)
