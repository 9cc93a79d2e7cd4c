"""Losses of tokens: pure functions with the interface of losses.py, of the weighted tokens of a
user, of sampled tokens, and of a teacher.

`advantages_N` has the advantage of each token's answer, which is how much better than expected it
was. `old_log_probs_N` are the log-probs of the model that sampled it. docs/rl.md lists which
advantages and which division make which algorithm. Distillation compares two distributions over the
J most likely tokens of the teacher and all other tokens together.

Shapes: N supervised tokens of a micro-batch, row by row, R the J + 1 events. N may be 0.
"""

import math

import torch
from torch import Tensor

from megatron_vlm.config.bounds import AboveZero, ShareAboveZero, violated_range
from megatron_vlm.errors import ConfigError

Losses = tuple[Tensor, dict[str, Tensor]]  # loss of each token, and reported values of each token


def cross_entropy(log_probs_N: Tensor) -> Losses:
    """Return the loss of supervised fine-tuning."""
    return -log_probs_N, {}


def weighted_cross_entropy(log_probs_N: Tensor, weights_N: Tensor) -> Losses:
    """Return the cross-entropy of tokens whose weights may have any sign, or be 0. Unlike
    `loss_weights_S` they do not change the divisor of the sum: with a divisor of 1 the loss is a
    sum."""
    return -weights_N * log_probs_N, {}


def importance_sampling(
    log_probs_N: Tensor, advantages_N: Tensor, old_log_probs_N: Tensor
) -> Losses:
    """Return the policy gradient loss of tokens that a model with `old_log_probs` has sampled. With
    the current model it is REINFORCE."""
    ratio_N = (log_probs_N - old_log_probs_N).exp()
    return -ratio_N * advantages_N, _drift(log_probs_N, old_log_probs_N)


def ppo(
    log_probs_N: Tensor,
    advantages_N: Tensor,
    old_log_probs_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Losses:
    """Return PPO's clipped loss, without a reward for a ratio beyond [1 - clip_low, 1 + clip_high].
    A clip_high above clip_low is DAPO's clip-higher."""
    ratio_N = (log_probs_N - old_log_probs_N).exp()
    loss_N, clipped = _clipped_losses("ppo", ratio_N, advantages_N, clip_low, clip_high)
    return loss_N, clipped | _drift(log_probs_N, old_log_probs_N)


def gspo(
    log_probs_N: Tensor,
    advantages_N: Tensor,
    old_log_probs_N: Tensor,
    sequences_N: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Losses:
    """Return the loss of Group Sequence Policy Optimization (arXiv 2507.18071): ppo with one ratio
    for all tokens of a sequence, the geometric mean of the tokens' ratios. `sequences_N` is the row
    of each token. A row is whole in its micro-batch."""
    log_ratio_N = log_probs_N - old_log_probs_N
    ratio_N = _means_of_sequences(log_ratio_N, sequences_N).exp()
    loss_N, clipped = _clipped_losses("gspo", ratio_N, advantages_N, clip_low, clip_high)
    return loss_N, clipped | _drift(log_probs_N, old_log_probs_N)


def gspo_token(
    log_probs_N: Tensor,
    advantages_N: Tensor,
    old_log_probs_N: Tensor,
    sequences_N: Tensor,
    sequence_mask_N: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Losses:
    """Return the GSPO-token loss of the same paper. Each token's gradient is that of its own
    log-prob, so that the tokens of a sequence may differ in their advantages. The mean of a
    sequence is over the tokens whose `sequence_mask` is not 0; a sequence without such tokens has
    the ratio 1."""
    log_ratio_N = (log_probs_N - old_log_probs_N).detach()
    mask_N = (sequence_mask_N != 0).to(log_ratio_N.dtype)
    whole_N = _means_of_sequences(log_ratio_N, sequences_N, mask_N).exp()
    ratio_N = whole_N * (log_probs_N - log_probs_N.detach()).exp()
    loss_N, clipped = _clipped_losses("gspo_token", ratio_N, advantages_N, clip_low, clip_high)
    return loss_N, clipped | _drift(log_probs_N, old_log_probs_N)


def cispo(
    log_probs_N: Tensor,
    advantages_N: Tensor,
    old_log_probs_N: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Losses:
    """Return the CISPO loss (MiniMax-M1, arXiv 2506.13585): REINFORCE, weighted by clipped
    importance sampling. The ratio has no gradient, so that a clipped token still has one. With
    clip_low=1 only ratios above 1 + clip_high are clipped."""
    ratio_N = (log_probs_N.detach() - old_log_probs_N).exp()
    weight_N = _clip_ratio("cispo", ratio_N, clip_low, clip_high)
    report = {"clip_fraction": (weight_N != ratio_N).float()}
    loss_N = -weight_N * advantages_N * log_probs_N
    return loss_N, report | _drift(log_probs_N, old_log_probs_N)


def dro(
    log_probs_N: Tensor, advantages_N: Tensor, old_log_probs_N: Tensor, *, beta: float = 0.05
) -> Losses:
    """Return the loss of Direct Reward Optimization (arXiv 2405.19107): REINFORCE on samples of any
    policy, near which half of `beta` times the squared change of each log-prob keeps the model."""
    if beta < 0:
        raise ConfigError(place="loss dro", key="beta", found=beta, allowed="0 or above")
    moved_N = log_probs_N - old_log_probs_N
    loss_N = 0.5 * beta * moved_N.square() - log_probs_N * advantages_N
    return loss_N, _drift(log_probs_N, old_log_probs_N)


def kl_k3(log_probs_N: Tensor, other_log_probs_N: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(policy || other) from tokens that the policy sampled. It
    is unbiased like the plain difference of log-probs, never negative, and has less variance."""
    log_ratio_N = other_log_probs_N - log_probs_N
    return log_ratio_N.expm1() - log_ratio_N


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
    mixture_NR = torch.where(teacher_NR == student_NR, student_NR, mixture_NR)  # without rounding
    return beta * _kl(teacher_NR, mixture_NR) + (1 - beta) * _kl(student_NR, mixture_NR)


def distill(
    log_probs_N: Tensor,
    student_NR: Tensor,
    teacher_NR: Tensor,
    *,
    beta: float = 0.0,
    ce_coef: float = 0.0,
) -> Losses:
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
    shares_NR, others_NR = first_NR.exp(), second_NR.exp()
    # The shares of both always have the sum 1. So the gradients of these sums are left out: they
    # are zero apart from rounding, which would be learnt where there is nothing else to learn.
    constant_NR = (shares_NR - shares_NR.detach()) - (others_NR - others_NR.detach())
    return (shares_NR * (first_NR - second_NR) - constant_NR).sum(dim=1)


LOSSES = (
    *(cross_entropy, weighted_cross_entropy, importance_sampling, ppo, gspo, gspo_token),
    *(cispo, dro, distill),
)


def _clipped_losses(
    name: str, ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """Return PPO's pessimistic bound, and report where the clipped ratio's loss is the larger."""
    plain_N = ratio_N * advantages_N
    clipped_N = _clip_ratio(name, ratio_N, clip_low, clip_high) * advantages_N
    report = {"clip_fraction": (clipped_N < plain_N).float()}
    return -torch.minimum(plain_N, clipped_N), report


def _clip_ratio(name: str, ratio_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Clip the ratio to [1 - clip_low, 1 + clip_high]. An upper bound that its dtype cannot hold is
    no bound, such as the largest float64, which torch's clamp refuses."""
    for key, value, kind in (
        ("clip_low", clip_low, ShareAboveZero),
        ("clip_high", clip_high, AboveZero),
    ):
        if (allowed := violated_range(kind, value)) is not None:
            raise ConfigError(
                ": the ratio is clipped to [1 - clip_low, 1 + clip_high]",
                place=f"loss {name}",
                key=key,
                found=value,
                allowed=str(allowed),
            )
    high = 1 + clip_high
    return ratio_N.clamp(1 - clip_low, high if high <= torch.finfo(ratio_N.dtype).max else math.inf)


def _means_of_sequences(
    values_N: Tensor, sequences_N: Tensor, mask_N: Tensor | None = None
) -> Tensor:
    """Return for each token the mean over its sequence, or over its tokens whose mask is 1. There
    are N sums: only the device knows the number of sequences, and the host must not wait for it."""
    starts_N = torch.zeros_like(sequences_N, dtype=torch.long)
    starts_N[1:] = sequences_N[1:] != sequences_N[:-1]
    place_N = starts_N.cumsum(0)
    counts_N = torch.ones_like(values_N) if mask_N is None else mask_N
    sums_N = torch.zeros_like(values_N).index_add(0, place_N, values_N * counts_N)
    lengths_N = torch.zeros_like(values_N).index_add(0, place_N, counts_N)
    return sums_N[place_N] / lengths_N[place_N].clamp(min=1)


def _drift(log_probs_N: Tensor, old_log_probs_N: Tensor) -> dict[str, Tensor]:
    """Report how far the policy has moved from the policy that sampled."""
    log_ratio_N = log_probs_N.detach() - old_log_probs_N
    return {"ratio": log_ratio_N.exp(), "old_kl": log_ratio_N.expm1() - log_ratio_N}
