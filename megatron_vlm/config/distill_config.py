"""Keys of distillation from stored targets of a teacher."""

from dataclasses import dataclass
from typing import Literal

from megatron_vlm.config.bounds import AboveZero, NonNegative, Share


@dataclass(frozen=True)
class DistillConfig:
    """train.objective=distill: the divergence from a teacher. See docs/distillation.md."""

    divergence: Literal["forward", "reverse", "jsd"] = "forward"  # KL either way, or GKD's mixture
    beta: Share = 0.5  # teacher's share of the mixture of jsd; 0: forward KL, 1: reverse KL
    temperature: AboveZero = 1.0  # divides the model's logits; it is that of megatron-vlm score
    ce_coef: NonNegative = 0.0  # coefficient of the cross-entropy, which is added
