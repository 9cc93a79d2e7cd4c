"""Terms of the loss of sampled answers: advantages, token weights, the divisor of the sum, and
importance weights between sampler and trainer. docs/rl.md lists the settings of each algorithm.
"""

import math
from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np

from megatron_vlm.config.schema import Advantage

Aggregate = Literal["tokens", "sequences", "constant"]

STD_FLOOR = 1e-4  # added to a group's standard deviation, as in TRL
MAX_LOG = 700.0  # exp of a larger number may overflow float64


def group_advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """Return the advantages of the answers to a prompt. grpo subtracts the mean and divides by the
    sample standard deviation, rloo subtracts the mean of the other answers, and dr_grpo subtracts
    the mean. All are zero where all rewards are equal, and with none."""
    assert rewards and all(map(math.isfinite, rewards)), rewards
    assert kind != "rloo" or len(rewards) > 1, "rloo compares an answer with others"
    if kind == "none" or min(rewards) == max(
        rewards
    ):  # exact zeros: the sums would leave a rounding error
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    over = [reward - mean for reward in rewards]
    if kind == "dr_grpo":
        return over
    if kind == "rloo":  # r - (sum - r) / (count - 1)
        return [each * count / (count - 1) for each in over]
    if kind == "grpo":
        std = math.sqrt(math.fsum(each * each for each in over) / (count - 1))
        return [each / (std + STD_FLOOR) for each in over]
    assert_never(kind)


def token_weights(lengths: Sequence[int], aggregate: Aggregate) -> list[float]:
    """Return the token weight of each answer, given its number of supervised tokens. With
    "sequences" all answers have the same total weight, otherwise all tokens have the same
    weight."""
    if aggregate == "sequences":
        return [1 / max(length, 1) for length in lengths]
    return [1.0] * len(lengths)


def divisor_of(lengths: Sequence[int], aggregate: Aggregate, max_tokens: int) -> float | None:
    """Return the divisor of the weighted sum over all answers of a step. None means the sum of the
    weights, which is the number of tokens, or of answers that have tokens. "constant" is the
    divisor of Dr. GRPO, which does not depend on the lengths of the answers."""
    if aggregate == "constant":
        return float(len(lengths) * max_tokens)
    return None


def importance_weights(
    old_log_probs: Sequence[float],
    sampler_log_probs: Sequence[float],
    max_weight: float | None,
    mask: Sequence[float] | None = None,
) -> list[float]:
    """Return the weight of each token for truncated importance sampling: the ratio of the trainer's
    to the sampler's probability, at most `max_weight`, and 0 if the ratio is not within `mask`. If
    `max_weight` is None, all weights are 1.
    Multiply the token's advantage by its weight: a weight of the loss would enter the divisor and
    the KL term, too."""
    assert len(old_log_probs) == len(sampler_log_probs)
    if max_weight is None:
        return [1.0] * len(old_log_probs)
    assert max_weight > 0, max_weight
    log_ratio = np.subtract(old_log_probs, sampler_log_probs, dtype=np.float64)
    ratio = np.exp(np.minimum(log_ratio, MAX_LOG))
    low, high = mask or (0.0, math.inf)
    is_within = (low <= ratio) & (ratio <= high)
    weights: list[float] = np.where(is_within, np.minimum(ratio, max_weight), 0.0).tolist()
    return weights
