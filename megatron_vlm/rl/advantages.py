"""Numbers around the loss of sampled answers: their advantages, how much each of their tokens
weighs, what the sum is divided by, and how far the sampler was from the trainer. docs/rl.md says
which of them make which algorithm.
"""

import math
from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np

Advantage = Literal["grpo", "rloo", "dr_grpo"]
Aggregate = Literal["tokens", "sequences", "constant"]

STD_FLOOR = 1e-4  # added to a group's standard deviation, as in TRL
MOST_LOG = 700.0  # exp of more is no float64


def group_advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """How much better each answer to one prompt is than the others: grpo subtracts the mean and
    divides by the sample standard deviation, rloo subtracts the mean of the other answers, dr_grpo
    the mean. Zeros where all rewards are equal."""
    assert rewards and all(map(math.isfinite, rewards)), rewards
    assert kind != "rloo" or len(rewards) > 1, "rloo compares an answer with others"
    if min(rewards) == max(rewards):  # exactly: sums would leave a rounding error
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
    """Of each answer the weight of each of its tokens, by the number of its supervised tokens.
    With "sequences" all answers weigh the same, otherwise all tokens."""
    if aggregate == "sequences":
        return [1 / max(length, 1) for length in lengths]
    return [1.0] * len(lengths)


def divisor_of(lengths: Sequence[int], aggregate: Aggregate, max_tokens: int) -> float | None:
    """What the weighted sum over all answers of a step is divided by. None: by the sum of weights,
    which is the number of tokens, or of answers that have any. "constant" is that of Dr. GRPO,
    which does not depend on how long the answers were."""
    if aggregate == "constant":
        return float(len(lengths) * max_tokens)
    return None


def importance_weights(
    old_log_probs: Sequence[float], sampler_log_probs: Sequence[float], most: float | None
) -> list[float]:
    """Truncated importance sampling: for each token the ratio of what the trainer's model and what
    the sampler gave it, at most `most`; None: 1. Multiply the token's advantage by it: as a weight
    of the loss it would be part of the divisor, too, and of the KL term."""
    assert len(old_log_probs) == len(sampler_log_probs)
    if most is None:
        return [1.0] * len(old_log_probs)
    assert most > 0, most
    log_ratio = np.subtract(old_log_probs, sampler_log_probs, dtype=np.float64)
    found: list[float] = np.minimum(np.exp(np.minimum(log_ratio, MOST_LOG)), most).tolist()
    return found
