"""Backends of the decoder's layers, `model.backend`: which norms they fuse with the linear layer
that follows, and what they cannot do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_vlm.config.schema import Config
from megatron_vlm.family.decoder_layers import DenseMLP, LayerParam, LayerSpec

if TYPE_CHECKING:
    from megatron_vlm.family.spec import TextSizes

# A refusal is the key, the value, the reason and the remedy.
Refusal = tuple[str, object, str, str]

_TE_LORA = (
    "Transformer Engine fuses each norm with the linear layer after it, so that an adapter there "
    "would not see what the layer sees"
)

_TE_OFFLOAD = (
    "Transformer Engine marks the gradients of its weights in its own layers, where hooks on saved "
    "tensors would lose the marks"
)


@dataclass(frozen=True)
class Backend:
    """A backend."""

    name: str
    fuses_norms: bool  # each norm is a weight of the linear layer that follows it
    has_own_kernels: bool  # it chooses among attention kernels of its own

    def our_name(self, layer: LayerSpec, param: LayerParam) -> str:
        """Return the name of a layer's parameter in the modules that this backend builds."""
        if self.fuses_norms and param.name == "input_layernorm.weight":
            return "self_attention.linear_qkv.layer_norm_weight"
        is_dense = isinstance(layer.ffn, DenseMLP)
        if self.fuses_norms and is_dense and param.name == "pre_mlp_layernorm.weight":
            return "mlp.linear_fc1.layer_norm_weight"
        return param.name

    def refusals(self, cfg: Config) -> Iterator[Refusal]:
        """Yield the settings that this backend cannot carry out with any checkpoint."""
        if self.has_own_kernels and cfg.model.attention != "auto":
            reason = "Transformer Engine chooses among kernels of its own"
            remedy = "set model.attention=auto, or model.backend=torch"
            yield "model.attention", cfg.model.attention, reason, remedy
        if self.fuses_norms and cfg.lora.rank:
            yield "lora.rank", cfg.lora.rank, _TE_LORA, "set model.backend=torch"
        if self.fuses_norms and (share := cfg.model.offload_activations):
            remedy = "set model.backend=torch, or model.recompute in its place"
            yield "model.offload_activations", share, _TE_OFFLOAD, remedy

    def layer_refusals(self, text: "TextSizes") -> Iterator[Refusal]:
        """Yield what this backend cannot build of a decoder."""
        kinds = {
            "gated delta nets": text.delta_net is not None,
            "gated attention": any(each.gated for each in text.attentions),
            "norms that multiply by 1 + weight": text.centered_norms,
            "norms after attention and MLP": any(type(x) is not LayerSpec for x in text.layers),
        }
        if self.fuses_norms and (found := [kind for kind, is_there in kinds.items() if is_there]):
            reason = f"only the torch backend has the {', '.join(found)} of this checkpoint"
            yield "model.backend", self.name, reason, "set model.backend=torch"


BACKENDS = {
    "torch": Backend("torch", fuses_norms=False, has_own_kernels=False),
    "te": Backend("te", fuses_norms=True, has_own_kernels=True),
}
