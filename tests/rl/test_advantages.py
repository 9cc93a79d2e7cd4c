# .venv/bin/python -m pytest tests/rl/test_advantages.py
"""Tests of a group's advantages, weights of tokens, divisors and importance weights, against the
formulas of their papers."""

import math
import statistics

import pytest

from megatron_vlm.rl.policy_update import importance_weights
from megatron_vlm.rl.train_batch import divisor_of, group_advantages, token_weights

GROUPS = [[1.0, 0.0, 0.0, 1.0, 0.5], [0.1, 0.2], [-3.0, 1e6, 2.5], [0, 1, 1, 1, 1, 1, 1, 1]]


def leave_one_out(rewards: list[float]) -> list[float]:
    others = [rewards[:place] + rewards[place + 1 :] for place in range(len(rewards))]
    return [r - statistics.fmean(rest) for r, rest in zip(rewards, others, strict=True)]


def standardised(rewards: list[float]) -> list[float]:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)  # the deviation of a sample
    return [(r - mean) / (std + 1e-4) for r in rewards]


FORMULAS = {
    "grpo": standardised,
    "rloo": leave_one_out,
    "dr_grpo": lambda rewards: [r - statistics.fmean(rewards) for r in rewards],
}


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
@pytest.mark.parametrize("kind", FORMULAS)
def test_advantages_are_those_of_the_papers(kind, rewards):
    advantages = group_advantages(rewards, kind)
    assert advantages == pytest.approx(FORMULAS[kind](rewards), rel=1e-12)
    assert all(type(each) is float for each in advantages)


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("reward", [0.1, 0, -1e9, 1 / 3])
def test_equal_rewards_say_nothing(kind, reward):
    """The advantages are exactly 0, though the mean of ten times 0.1 may not be 0.1."""
    for count in (2, 3, 7, 10):
        assert group_advantages([reward] * count, kind) == [0.0] * count


def test_a_group_of_one():
    assert group_advantages([2.5], "grpo") == group_advantages([2.5], "dr_grpo") == [0.0]
    with pytest.raises(AssertionError, match="rloo"):
        group_advantages([2.5], "rloo")
    with pytest.raises(AssertionError):
        group_advantages([math.nan, 1.0], "grpo")


@pytest.mark.parametrize("aggregate", ["tokens", "sequences", "constant"])
def test_sums_of_weighted_losses_over_the_divisor(aggregate):
    losses = [[1.0, 2.0, 6.0], [5.0], [2.0, -4.0]]
    expected = {"tokens": 12 / 6, "sequences": (3 + 5 - 1) / 3, "constant": 12 / (3 * 10)}
    lengths = [len(each) for each in losses]
    weights = token_weights(lengths, aggregate)
    divisor = divisor_of(lengths, aggregate, 10)
    total = sum(w * sum(each) for w, each in zip(weights, losses, strict=True))
    weight = sum(w * length for w, length in zip(weights, lengths, strict=True))
    assert total / (weight if divisor is None else divisor) == pytest.approx(expected[aggregate])
    assert (divisor is None) == (aggregate != "constant")


def test_answers_without_a_token():
    assert token_weights([0, 2], "sequences") == [1.0, 0.5]
    assert divisor_of([0, 2], "constant", 10) == 20.0


def test_importance_weights_are_truncated_above_alone():
    old, sampler = [-1.0, -2.0, -0.5, -1.0], [-1.0, -1.0, -3.0, -900.0]
    weights = importance_weights(old, sampler, 2.0)
    assert weights == [1.0, pytest.approx(math.exp(-1)), 2.0, 2.0]
    assert importance_weights(old, sampler, 20.0)[2] == pytest.approx(math.exp(2.5))
    assert importance_weights(old, sampler, None) == [1.0] * 4
    assert importance_weights([], [], 2.0) == []


def test_weights_beyond_the_mask_are_zero():
    old = [math.log(each) for each in (0.1, 0.25, 0.5, 1.0)]
    assert importance_weights(old, [math.log(0.5)] * 4, 1.5, [0.5, 1.9]) == [0.0, 0.5, 1.0, 0.0]
    assert importance_weights(old, [math.log(0.5)] * 4, 1.5, [0.4, 2.1]) == [0.0, 0.5, 1.0, 1.5]
