"""Message from one pipeline stage to the next.

Shapes: S tokens (Megatron is sequence first), B rows, H width of the decoder, K DeepStack features
still to be added.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes


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
        """Return the tensor to send after `layers` layers, each of which has added a feature."""
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
