"""Log-probs of the targets, and the entropy, from logits that are split over TP.

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
    logits_NV = _without_padding(logits_NV, vocab, tp_group)
    return -vocab_parallel_cross_entropy(logits_NV, targets_N)


def log_probs_and_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab: int, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`target_log_probs`, and the entropy of each distribution in nats [N], from one softmax."""
    logits_NV = _without_padding(logits_NV, vocab, tp_group)
    found: tuple[Tensor, Tensor] = _LogProbsAndEntropy.apply(logits_NV, targets_N, tp_group)
    return found


def _without_padding(logits_NV: Tensor, vocab: int, tp_group: dist.ProcessGroup) -> Tensor:
    logits_NV = logits_NV.float()
    first = dist.get_rank(tp_group) * logits_NV.shape[-1]
    valid = min(max(vocab - first, 0), logits_NV.shape[-1])
    if valid < logits_NV.shape[-1]:
        padding = torch.arange(logits_NV.shape[-1], device=logits_NV.device) >= valid
        logits_NV = logits_NV.masked_fill(padding, float("-inf"))
    return logits_NV


class _LogProbsAndEntropy(torch.autograd.Function):
    """Autograd through collectives would need a rule for each: here the gradient is written out,
    and of [N, V] only the probabilities are kept."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        highest_N = logits_NV.max(dim=-1).values
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - highest_N[:, None]
        width = logits_NV.shape[-1]
        column_N = targets_N - dist.get_rank(group) * width
        mine_N = (column_N >= 0) & (column_N < width)
        column_N = column_N.clamp(0, width - 1)
        picked_N = shifted_NV.gather(1, column_N[:, None])[:, 0] * mine_N
        exp_NV = shifted_NV.exp()
        # Padding has probability 0 and a logit of -inf, whose product counts as 0.
        weighted_NV = exp_NV * shifted_NV.masked_fill_(exp_NV == 0, 0.0)
        sums_3N = torch.stack([picked_N, exp_NV.sum(-1), weighted_NV.sum(-1)])
        dist.all_reduce(sums_3N, group=group)
        picked_N, total_N, weighted_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(exp_NV.div_(total_N[:, None]), column_N, mine_N, entropy_N)
        return picked_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """With p = softmax(logits): d log p_t = [v = t] - p_v; dH = -p_v (log p_v + H)."""
        probs_NV, column_N, mine_N, entropy_N = ctx.saved_tensors
        of_log_prob_N1, of_entropy_N1 = (grad[:, None] for grad in grads)
        slope_NV = torch.xlogy(probs_NV, probs_NV).add_(probs_NV * entropy_N[:, None])
        grad_NV = slope_NV.mul_(-of_entropy_N1).sub_(probs_NV * of_log_prob_N1)
        grad_NV.scatter_add_(1, column_N[:, None], of_log_prob_N1 * mine_N[:, None])
        return grad_NV, None, None
