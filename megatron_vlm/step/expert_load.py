"""How evenly a step's tokens went to the experts.

Shapes: L decoder layers, E experts.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
    load_LE = load_of_experts(chunks, text, device)
    begin_count(chunks)
    busiest_L = load_LE.amax(1) / load_LE.mean(1)
    return {"expert_load": float(busiest_L[sorted(text.experts.layers)].amax())}


def load_of_experts(
    chunks: Sequence[Qwen3VLGPTModel], text: TextSizes, device: torch.device
) -> Tensor:
    """The tokens [L, E] of all ranks in training since counting began. A collective."""
    assert text.experts is not None
    load_LE = torch.zeros(text.layers, text.experts.count, dtype=torch.float64)
    for mlp in _expert_mlps(chunks):
        load_LE[mlp.layer - 1] = torch.tensor(mlp.load)
    load_LE = load_LE.to(device)
    dist.all_reduce(load_LE)
    return load_LE


def begin_count(chunks: Sequence[Qwen3VLGPTModel]) -> None:
    """Forget what was counted."""
    for mlp in _expert_mlps(chunks):
        mlp.load = [0] * mlp.experts


def _expert_mlps(chunks: Sequence[Qwen3VLGPTModel]) -> Iterator[ExpertMLP]:
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if isinstance(layer.mlp, ExpertMLP):
            yield layer.mlp
