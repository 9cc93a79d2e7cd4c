"""Reverse KL from a student to its teacher, over the teacher's most likely tokens and the rest.

A place has the sampled token as its first target, for the policy loss, and the teacher's K most
likely tokens as the others. All tokens beyond these K count as one. So the KL is exact for this
partition of the vocabulary, and a lower bound of the KL over the whole vocabulary.

Shapes: N places, K tokens of the teacher, M = N x (1 + K) targets.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

# The smallest probability of the rest. The rest is 1 minus a sum of fp32 probabilities, so below
# this it would be their rounding.
_SMALLEST_REST = 2.0**-20


def lumped_reverse_kl(log_probs_NK: Tensor, teacher_log_probs_NK: Tensor) -> Tensor:
    """Return KL(student || teacher) of each place, from both models' log-probs of the same K tokens
    and from the rest of both. It is computed in float64."""
    log_probs, teacher_log_probs = log_probs_NK.double(), teacher_log_probs_NK.double()
    kl_N = (log_probs.exp() * (log_probs - teacher_log_probs)).sum(-1)
    rest_N, teacher_rest_N = _rest_of(log_probs), _rest_of(teacher_log_probs)
    return kl_N + rest_N * (rest_N.log() - teacher_rest_N.log())


def _rest_of(log_probs_NK: Tensor) -> Tensor:
    return (1 - log_probs_NK.exp().sum(-1)).clamp(min=_SMALLEST_REST)


def with_lumped_kl(
    policy_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]], top_k: int, coef: float
) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a loss (see losses.py) that adds `coef` times this KL to a policy loss. It reads each
    value of the policy loss at the sampled token, `teacher_log_probs` at the teacher's tokens, and
    `token_weights`, which multiply the loss of a place, at the sampled token."""

    def distilled(
        log_probs_M: Tensor, *values_M: Tensor, **options: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        by_place = (each.reshape(-1, 1 + top_k) for each in (log_probs_M, *values_M))
        log_probs, *own, teacher_log_probs, weights = by_place
        loss_N, report = policy_loss(log_probs[:, 0], *(each[:, 0] for each in own), **options)
        kl_N = lumped_reverse_kl(log_probs[:, 1:], teacher_log_probs[:, 1:])
        loss_N = weights[:, 0] * (loss_N + coef * kl_N)
        # The first target of a place has the loss. All of its targets report the same values, so
        # that the mean over targets is the mean over places.
        loss_M = F.pad(loss_N[:, None], (0, top_k)).flatten()
        report = {**report, "teacher_kl": kl_N.detach()}
        return loss_M, {key: value.repeat_interleave(1 + top_k) for key, value in report.items()}

    own_parameters = inspect.signature(policy_loss).parameters.values()
    positional = [each for each in own_parameters if each.kind is not each.KEYWORD_ONLY]
    more = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("teacher_log_probs_N", "token_weights_N")
    ]
    options = [each for each in own_parameters if each.kind is each.KEYWORD_ONLY]
    function: Any = distilled
    function.__signature__ = inspect.Signature([*positional, *more, *options])
    function.__name__ = f"{policy_loss.__name__}_with_teacher"
    return distilled
