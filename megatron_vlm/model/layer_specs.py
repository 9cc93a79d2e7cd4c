"""Decoder layer as Megatron's ModuleSpec: the class that fills each place, for each backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import Experts, GatedDeltaNet, LayerSpec
from megatron_vlm.family.spec import TextSizes
from megatron_vlm.hf.backend import BACKENDS
from megatron_vlm.model.attention import CachedAttention, FusedSelfAttention, SDPACoreAttention
from megatron_vlm.model.delta_kernels import DeltaRule
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.gated_delta_net import GatedDeltaMixer
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.model.megatron_versions import ChainActivation, LayerMLP, LayerPart
from megatron_vlm.model.offload_activations import OffloadPass
from megatron_vlm.model.router import Routing


@dataclass(frozen=True)
class PassContext:
    """Values that the layers of a chunk read in one pass of a micro-batch, besides hidden states:
    the routing of its tokens to experts, in generation the cache of its rows, and in training what
    moves their activations to the host."""

    routing: Routing
    cache: KVCache | None = None
    offload: OffloadPass | None = None

    @contextmanager
    def on(self, layer: Any) -> Iterator[None]:
        """Give the context to the parts of a layer that read it."""
        if self.offload is not None:
            self.offload.begin_layer(layer)
        mixer = getattr(layer.self_attention, "core_attention", layer.self_attention)
        mixer.cache, layer.mlp.routing = self.cache, self.routing
        try:
            yield
        finally:
            mixer.cache = layer.mlp.routing = None


class DecoderLayer(TransformerLayer):
    """Decoder layer that adds the first of its DeepStack features to its output and passes on the
    rest.

    The features travel as `context_KSBH`: the block passes this tensor from layer to layer, and
    full recompute passes it as an explicit argument, so the gradient of the features survives a
    reentrant checkpoint. The context of the pass is no tensor. It travels as `attention_bias`,
    because the block hands that object to each layer unchanged, and full recompute hands over the
    same object again. An attribute that is set around the whole block would be that of another
    micro-batch when a layer is recomputed.
    """

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        attention_bias: PassContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert attention_bias is not None
        with attention_bias.on(self):
            hidden_SBH, _ = super().forward(*args, context=None, **kwargs)
        if context is None:
            return hidden_SBH, None
        return hidden_SBH + context[0], context[1:] if len(context) > 1 else None


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
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = partial(CachedAttention, attention.core_attention)
    return replace(spec, module=DecoderLayer)


def block_spec(
    options: BuildOptions, text: TextSizes, layers: Sequence[LayerSpec]
) -> TransformerBlockSubmodules:
    """Return these decoder layers of one stage, and the norm that follows the last layer of the
    model."""
    norm = _norm(options, text)
    is_te = BACKENDS[options.backend].fuses_norms
    base = te_layer_spec() if is_te else torch_layer_spec(options, text)

    def spec_of(layer: LayerSpec) -> ModuleSpec:
        parts: dict[str, Any] = {}
        if isinstance(layer.mixer, GatedDeltaNet):
            parts["self_attention"] = ModuleSpec(
                module=GatedDeltaMixer,
                params={"sizes": layer.mixer, "rule": options.delta_rule},
            )
        if isinstance(layer.ffn, Experts):
            # Transformer Engine's dense layer has the norm inside the MLP's first linear layer.
            parts |= {"pre_mlp_layernorm": norm, "mlp": options.expert_mlp}
        return replace(base, submodules=replace(base.submodules, **parts))

    return TransformerBlockSubmodules([spec_of(layer) for layer in layers], layer_norm=norm)
