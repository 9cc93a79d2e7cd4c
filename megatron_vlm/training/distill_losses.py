"""Losses of distillation: divergences between a model and its teacher at each supervised token.

Both have a distribution over the same events of a token: the J most likely tokens of the teacher,
and all other tokens together.

Shapes: N supervised tokens of a micro-batch, R the J + 1 events. N may be 0.
"""

import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError


def generalized_jsd(student_NR: Tensor, teacher_NR: Tensor, beta: float) -> Tensor:
    """Return the divergence of each token from log-probs, as GKD defines it (arXiv 2306.13649):
    with the mixture M = beta teacher + (1 - beta) student it is
    beta KL(teacher || M) + (1 - beta) KL(student || M). As in TRL, 0 stands for the forward KL,
    KL(teacher || student), and 1 for the reverse KL, KL(student || teacher)."""
    if beta == 0:
        return _kl(teacher_NR, student_NR)
    if beta == 1:
        return _kl(student_NR, teacher_NR)
    shares = torch.tensor([beta, 1 - beta], dtype=torch.float64).log().tolist()
    mixture_NR = torch.logaddexp(teacher_NR + shares[0], student_NR + shares[1])
    return beta * _kl(teacher_NR, mixture_NR) + (1 - beta) * _kl(student_NR, mixture_NR)


def distill(
    log_probs_N: Tensor,
    student_NR: Tensor,
    teacher_NR: Tensor,
    *,
    beta: float = 0.0,
    ce_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `generalized_jsd` and, added to it, `ce_coef` times the cross-entropy."""
    if not 0 <= beta <= 1:
        allowed = "from 0 (forward KL) to 1 (reverse KL)"
        raise ConfigError(place="loss distill", key="beta", found=beta, allowed=allowed)
    if ce_coef < 0:
        raise ConfigError(place="loss distill", key="ce_coef", found=ce_coef, allowed="0 or above")
    divergence_N = generalized_jsd(student_NR, teacher_NR, beta)
    loss_N = divergence_N - ce_coef * log_probs_N if ce_coef else divergence_N
    return loss_N, {"divergence": divergence_N, "cross_entropy": -log_probs_N}


def _kl(first_NR: Tensor, second_NR: Tensor) -> Tensor:
    """Return KL(first || second). Its gradient is exactly zero where both are equal."""
    shares_NR = first_NR.exp()
    # The shares always have the sum 1. So the gradient of this sum is left out:
    # it is zero apart from rounding, which would be learnt where there is nothing else to learn.
    constant_NR = shares_NR - shares_NR.detach()
    return (shares_NR * (first_NR - second_NR) - constant_NR).sum(dim=1)
