"""Decoder layer that adds DeepStack features to the hidden states, and the values that it reads in
one pass of a micro-batch.

Shapes: S tokens (Megatron is sequence first), B rows, H width, K DeepStack features, N supervised
places.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_vlm.model.flash_windows import PictureTokens
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.model.offload_activations import OffloadPass
from megatron_vlm.model.router import Routing


@dataclass(frozen=True)
class PassContext:
    """Values that the layers of a chunk read in one pass of a micro-batch, besides hidden states:
    the ids of its tokens and their routing to experts, in generation the cache of its rows, and in
    training what moves their activations to the host."""

    ids_BS: Tensor
    routing: Routing
    cache: KVCache | None = None
    offload: OffloadPass | None = None
    has_visuals: bool = True  # whether there are images or videos; the host knows it in advance
    # Places in the flattened [S * B] to which the last layer's feed-forward network is applied,
    # because the head reads no others. None: all.
    places_N: Tensor | None = None
    pictures: PictureTokens | None = None  # None: not known on the host
    # The last layer's output at all places, where `places_N` leaves some out and an MTP head
    # reads it. None: nothing reads it.
    all_places: list[Tensor] | None = None
    # Masks of attention that layers share, by what they depend on. The first of them makes each.
    masks: dict[object, Tensor] = field(default_factory=dict)

    @contextmanager
    def on(self, layer: Any) -> Iterator[None]:
        """Give the context to the parts of a layer that read it."""
        if self.offload is not None:
            self.offload.begin_layer(layer)
        mixer = getattr(layer.self_attention, "core_attention", layer.self_attention)
        mixer.context, layer.mlp.routing = self, self.routing
        try:
            yield
        finally:
            mixer.context = layer.mlp.routing = None


def mixer_linears(
    config: TransformerConfig, outputs: int, inputs: int, tp: Any
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Return the first linear of a mixer, which has these outputs, and the last, which has these
    inputs, over all ranks of `tp`. Both have no bias and unset weights."""
    width, shared = config.hidden_size, {"config": config, "bias": False, "tp_group": tp}
    first = ColumnParallelLinear(
        *(width, outputs),
        init_method=config.init_method,
        gather_output=False,
        skip_bias_add=False,
        **shared,
    )
    last = RowParallelLinear(
        *(inputs, width),
        init_method=config.output_layer_init_method,
        input_is_parallel=True,
        skip_bias_add=True,
        **shared,
    )
    return first, last


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

    is_last = False  # in the model; StageModel sets it

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        attention_bias: PassContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert attention_bias is not None
        places_N = attention_bias.places_N if self.is_last else None
        with attention_bias.on(self):
            hidden_SBH, _ = self._forward_attention(*args, context=None, **kwargs)
            kept = attention_bias.all_places
            if self.is_last and kept == []:  # a recomputation has the output already
                with torch.no_grad():
                    kept.append(self._forward_mlp(hidden_SBH))
            hidden_SBH = self._forward_mlp(_pick(hidden_SBH, places_N))
        if context is None:
            return hidden_SBH, None
        added_SBH = _pick(context[0], places_N)
        return hidden_SBH + added_SBH, context[1:] if len(context) > 1 else None


def _pick(hidden_SBH: Tensor, places_N: Tensor | None) -> Tensor:
    """Return the hidden states at these places as [N, 1, H], or all of them."""
    if places_N is None:
        return hidden_SBH
    return hidden_SBH.flatten(0, 1).index_select(0, places_N)[:, None]


class ScaledDecoderLayer(DecoderLayer):
    """Decoder layer whose output is multiplied by a scalar that does not learn."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        # Megatron's enables gradients, so that a recomputed layer's norms would keep their inputs.
        self.bias_dropout_add_exec_handler = nullcontext

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hidden_SBH, features = super().forward(*args, **kwargs)
        return hidden_SBH * self.layer_scalar, features
