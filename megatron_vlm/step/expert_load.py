"""How evenly a step's tokens went to the experts.

Shapes: L decoder layers, E experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_vlm.family.sizes import TextSizes
from megatron_vlm.model.experts import ExpertMLP
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel


def take_expert_load(
    chunks: Sequence[Qwen3VLGPTModel], text: TextSizes, device: torch.device
) -> dict[str, float]:
    """`expert_load`: the tokens of the busiest expert over those of the mean one, in the layer
    where that is most; 1 is perfect balance. Nothing for a dense model. Counting begins anew. A
    collective of all ranks."""
    if text.experts is None:
        return {}
    load_LE = torch.zeros(text.layers, text.experts.count, dtype=torch.float64)
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if isinstance(layer.mlp, ExpertMLP):
            load_LE[layer.mlp.layer - 1] = torch.tensor(layer.mlp.load)
            layer.mlp.load = [0] * text.experts.count
    load_LE = load_LE.to(device)
    dist.all_reduce(load_LE)
    busiest_L = load_LE.amax(1) / load_LE.mean(1)
    return {"expert_load": float(busiest_L[sorted(text.experts.layers)].amax())}
