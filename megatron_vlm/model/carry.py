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
    layers will add, and the decoder's input where an MTP head is trained. A family without
    DeepStack has no features, and neither has a micro-batch without images.

    One tensor is sent, in which the extras follow the hidden states along the sequence. So any
    stage may hold the first decoder layers, and the first stage may hold none.
    """

    hidden_SBH: Tensor
    deepstack_KSBH: Tensor | None = None
    input_SBH: Tensor | None = None  # without a gradient

    def to_tensor(self, layers: int) -> Tensor:
        """Return the tensor to send after `layers` layers, each of which has added a feature."""
        parts, features_KSBH = [self.hidden_SBH], self.deepstack_KSBH
        if self.input_SBH is not None:
            parts.append(self.input_SBH)
        if features_KSBH is not None and len(features_KSBH) > layers:
            parts.append(features_KSBH[layers:].flatten(0, 1))
        return torch.cat(parts) if len(parts) > 1 else self.hidden_SBH

    @staticmethod
    def from_tensor(sent: Tensor, tokens: int, has_input: bool = False) -> "Carry":
        """Undo `to_tensor`. The length of the tensor tells the number of features."""
        hidden_SBH, rest = sent[:tokens], sent[tokens:]
        input_SBH = rest[:tokens].detach() if has_input else None
        rest = rest[tokens:] if has_input else rest
        return Carry(hidden_SBH, rest.unflatten(0, (-1, tokens)) if len(rest) else None, input_SBH)

    @staticmethod
    def extras(
        sizes: ModelSizes, dims: ParallelDims, place: int, has_images: bool, learns: bool = True
    ) -> int:
        """Return how many tensors as large as the hidden states travel beside them from this place
        in the pipeline to the next; -1 is the place before the first layer. In a pass from which
        nothing is learnt, an MTP head needs none."""
        features = dims.features_after(place, sizes.vision.deepstack) if has_images else 0
        return features + (learns and sizes.trains_mtp)
