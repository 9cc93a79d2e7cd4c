"""Decoder layer that adds DeepStack features to the hidden states, the values that it reads in one
pass of a micro-batch, and the message from one pipeline stage to the next.

Shapes: S tokens (Megatron is sequence first), B rows, H width of the decoder, K DeepStack features
still to be added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.kv_cache import KVCache
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
class Carry:
    """Hidden states, and the tensors that travel beside them: the DeepStack features that later
    layers will add. A family without DeepStack has none, and neither has a micro-batch without
    images.

    One tensor is sent, in which the extras follow the hidden states along the sequence. So any
    stage may hold the first decoder layers, and the first stage may hold none.
    """

    hidden_SBH: Tensor
    deepstack_KSBH: Tensor | None = None

    def to_tensor(self, layers: int) -> Tensor:
        """Return the tensor to send after `layers` more layers, each of which has added one
        DeepStack feature."""
        features_KSBH = self.deepstack_KSBH
        if features_KSBH is None or len(features_KSBH) <= layers:
            return self.hidden_SBH
        return torch.cat([self.hidden_SBH, features_KSBH[layers:].flatten(0, 1)])

    @staticmethod
    def from_tensor(sent: Tensor, tokens: int) -> "Carry":
        """Undo `to_tensor`. The length of the tensor tells the number of features."""
        hidden_SBH, rest = sent[:tokens], sent[tokens:]
        return Carry(hidden_SBH, rest.unflatten(0, (-1, tokens)) if len(rest) else None)

    @staticmethod
    def extras(sizes: ModelSizes, dims: ParallelDims, place: int, has_images: bool) -> int:
        """Return how many tensors as large as the hidden states travel beside them from this place
        in the pipeline to the next; -1 is the place before the first layer."""
        return dims.features_after(place, sizes.vision.deepstack) if has_images else 0
