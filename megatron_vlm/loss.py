"""Log-probs of the targets from logits that are split over TP, and the summed loss.

Shapes: N supervised tokens, V this rank's part of the padded vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def target_log_probs(
    logits_NV: Tensor, targets_N: Tensor, vocab: int, tp_group: dist.ProcessGroup
) -> Tensor:
    """Log-prob of each target [N], in fp32. Rows past the real vocabulary get no probability."""
    logits_NV = logits_NV.float()
    first = dist.get_rank(tp_group) * logits_NV.shape[-1]
    valid = min(max(vocab - first, 0), logits_NV.shape[-1])
    if valid < logits_NV.shape[-1]:
        padding = torch.arange(logits_NV.shape[-1], device=logits_NV.device) >= valid
        logits_NV = logits_NV.masked_fill(padding, float("-inf"))
    return -vocab_parallel_cross_entropy(logits_NV, targets_N)


def loss_of(log_probs_N: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The triple that Megatron's schedules take: summed loss, token count, what to report.

    Summed, not averaged: the gradient is divided once, by the count of the global batch, in
    Megatron's finalize_model_grads.
    """
    loss_sum = -log_probs_N.sum()
    count = torch.tensor(log_probs_N.numel(), dtype=torch.int, device=log_probs_N.device)
    return loss_sum, count, {"loss_sum": loss_sum.detach(), "log_probs_N": log_probs_N.detach()}


def collect(log_probs_N: Tensor, non_loss_data: bool = True) -> Any:
    """For Megatron's forward-only schedules: hand the log-probs through."""
    assert non_loss_data
    return log_probs_N
