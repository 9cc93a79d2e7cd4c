"""Terms of the loss of sampled answers: advantages, token weights, and the divisor of the sum.
docs/rl.md lists the settings of each algorithm.
"""

import math
from collections.abc import Sequence
from typing import Literal, assert_never

from megatron_vlm.config.schema import Advantage

Aggregate = Literal["tokens", "sequences", "constant"]

STD_FLOOR = 1e-4  # added to a group's standard deviation, as in TRL


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
