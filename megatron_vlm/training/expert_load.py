"""How evenly a step's tokens went to the experts.

Shapes: L decoder layers, E experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.family.spec import TextSizes
from megatron_vlm.model.experts import expert_mlps
from megatron_vlm.model.stage_model import Qwen3VLGPTModel


def take_expert_load(
    chunks: Sequence[Qwen3VLGPTModel], text: TextSizes, device: torch.device
) -> Tensor | None:
    """The tokens of the global batch that each expert of each layer with experts got [L, E], on the
    host. None for a dense model. Counting begins anew. A collective of all ranks."""
    if text.experts is None:
        return None
    load_LE = torch.zeros(text.layers, text.experts.count, dtype=torch.float64)
    for mlp in expert_mlps(chunks):
        load_LE[mlp.layer - 1] = torch.tensor(mlp.load)
    begin_count(chunks)
    load_LE = load_LE.to(device)
    dist.all_reduce(load_LE)
    return load_LE[sorted(text.experts.layers)].cpu()


def begin_count(chunks: Sequence[Qwen3VLGPTModel]) -> None:
    """Forget what was counted."""
    for mlp in expert_mlps(chunks):
        mlp.load = [0] * mlp.experts


def busiest(load_LE: Tensor) -> float:
    """The tokens of the busiest expert over those of the mean one, in the layer where that is most:
    1 is perfect balance."""
    return float((load_LE.amax(1) / load_LE.mean(1)).amax())


def percent_of_mean(load_LE: Tensor) -> list[list[int]]:
    """Of each expert, in whole percent of the mean one of its layer."""
    mean_L1 = load_LE.mean(1, keepdim=True).clamp(min=1e-9)
    found: list[list[int]] = (100 * load_LE / mean_L1).round().int().tolist()
    return found
