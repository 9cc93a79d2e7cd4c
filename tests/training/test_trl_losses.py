# make trl-env, then .venv/bin/python -m pytest tests/training/test_trl_losses.py
"""Losses of GRPO, DAPO, Dr. GRPO, GSPO and CISPO are those of TRL's GRPOTrainer, which gets our
log-probs: values and gradients. Advantages have TRL's standard deviation. The divergences of
distillation are those of its GKDTrainer over the same events, and the forward KL is that of its
IWOPDTrainer, which lumps all tokens but the teacher's likeliest ones itself."""

import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.rl.policy_update import importance_weights
from megatron_vlm.rl.train_batch import Aggregate, divisor_of, group_advantages, token_weights
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.token_losses import generalized_jsd
from tests.support.trl_environment import check_trl, run_trl

# TRL is imported, and makes a trainer for each case.
pytestmark = [pytest.mark.slow, pytest.mark.engine("trl")]
# Relative, in float64. Measured worst case: 2.2e-15.
TOLERANCE = 2e-14
LENGTHS, MAX_TOKENS, MOST = [7, 12, 1, 4], 12, 1.1
GROUPS = [[1.0, 0.0, 0.0, 1.0], [0.1, 0.2, 7.0], [-3.0, 1e6]]


@dataclass(frozen=True)
class Both:
    """A loss in TRL's words, and in ours."""

    theirs: dict[str, Any]
    loss: str
    aggregate: Aggregate
    options: dict[str, float] = field(default_factory=dict)
    truncated: bool = False


SEQUENCE = dict(importance_sampling_level="sequence")
CASES = {
    "grpo": Both(dict(loss_type="grpo"), "ppo", "sequences"),
    "grpo, beta": Both(dict(loss_type="grpo", beta=0.3), "ppo", "sequences", {"kl_coef": 0.3}),
    "grpo, truncated": Both(
        dict(loss_type="grpo", beta=0.3), "ppo", "sequences", {"kl_coef": 0.3}, truncated=True
    ),
    "bnpo": Both(
        dict(loss_type="bnpo", epsilon=0.1), "ppo", "tokens", dict(clip_low=0.1, clip_high=0.1)
    ),
    "dapo": Both(dict(loss_type="dapo", epsilon_high=0.28), "ppo", "tokens", {"clip_high": 0.28}),
    "dapo, beta, truncated": Both(
        dict(loss_type="dapo", epsilon_high=0.28, beta=0.1),
        "ppo",
        "tokens",
        dict(clip_high=0.28, kl_coef=0.1),
        truncated=True,
    ),
    "dr_grpo": Both(dict(loss_type="dr_grpo"), "ppo", "constant"),
    "dr_grpo, beta": Both(dict(loss_type="dr_grpo", beta=0.2), "ppo", "constant", {"kl_coef": 0.2}),
    "gspo": Both(
        dict(loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, **SEQUENCE), "gspo", "sequences"
    ),
    "gspo, wide, beta": Both(
        dict(loss_type="dapo", epsilon=0.05, epsilon_high=0.02, beta=0.2, **SEQUENCE),
        "gspo",
        "tokens",
        dict(clip_low=0.05, clip_high=0.02, kl_coef=0.2),
    ),
    # Its epsilon_high is the highest ratio itself.
    "cispo": Both(dict(loss_type="cispo", epsilon_high=1.28), "cispo", "tokens"),
    "cispo, beta, truncated": Both(
        dict(loss_type="cispo", epsilon_high=1.1, beta=0.2),
        "cispo",
        "tokens",
        dict(clip_high=0.1, kl_coef=0.2),
        truncated=True,
    ),
}


@dataclass(frozen=True)
class Samples:
    """Answers [A, T], with padding that would be noticed."""

    mask: Tensor
    advantages: Tensor  # [A]
    log_probs: Tensor
    old: Tensor
    reference: Tensor
    truncated: Tensor  # importance weights

    def inputs(self, both: Both) -> dict[str, Any]:
        found = {
            "completion_mask": self.mask.double(),
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
        }
        if both.truncated:
            found["importance_sampling_ratio"] = self.truncated
        return {name: value.tolist() for name, value in found.items()}


@pytest.fixture(scope="module")
def samples() -> Samples:
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        drawn = torch.randn(len(LENGTHS), MAX_TOKENS, generator=generator, dtype=torch.float64)
        return scale * drawn

    mask = torch.arange(MAX_TOKENS) < torch.tensor(LENGTHS)[:, None]
    log_probs = -2 + noise(0.5)
    shift = 0.1 * torch.tensor([[1.0], [-1.0], [0.0], [0.2]], dtype=torch.float64)
    old = log_probs + noise(0.3) + shift
    ratios = importance_weights(old.flatten(), (old + noise(0.2)).flatten(), MOST)
    advantages = torch.tensor(group_advantages([0.0, 1.0, 0.4, 0.7], "grpo"), dtype=torch.float64)
    truncated = torch.tensor(ratios, dtype=torch.float64).view_as(old)
    return Samples(mask, advantages, log_probs, old, log_probs + noise(0.4), truncated)


@pytest.fixture(scope="module")
def theirs(tiny, samples) -> dict[str, Any]:
    always = {
        "beta": 0.0,
        "max_completion_length": MAX_TOKENS,
        # TRL's default multiplies the KL of a token by its ratio, as DeepSeek-V3.2 does; GRPO's
        # paper does not, nor do we.
        "use_bias_correction_kl": False,
    }
    asked = [
        {
            "config": {**always, **both.theirs},
            "inputs": samples.inputs(both),
            "log_probs": samples.log_probs.tolist(),
        }
        for both in CASES.values()
    ]
    done = run_trl("trl_policy_losses.py", tiny(), given={"cases": asked, "rewards": GROUPS})
    return {**dict(zip(CASES, done["cases"], strict=True)), "stds": done["stds"]}


def ours(both: Both, samples: Samples) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, as the worker sums and divides."""
    log_probs = samples.log_probs.clone().requires_grad_()
    mask = samples.mask
    gains = samples.advantages[:, None].expand_as(mask)
    values = {
        "advantages": gains * samples.truncated if both.truncated else gains,
        "old_log_probs": samples.old,
        "ref_log_probs": samples.reference,
        "sequences": torch.arange(len(LENGTHS)).float()[:, None].expand_as(mask),
    }
    objective = Objective.create(both.loss, both.options)
    picked = {name: value[mask] for name, value in values.items()}
    losses, _ = objective.of_tokens(log_probs[mask], None, picked)
    weights = torch.tensor(token_weights(LENGTHS, both.aggregate), dtype=torch.float64)
    weights = weights[:, None].expand_as(mask)[mask]
    divisor = divisor_of(LENGTHS, both.aggregate, MAX_TOKENS)
    loss = (losses * weights).sum() / (weights.sum() if divisor is None else divisor)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, samples, theirs, record_property):
    check_trl(*ours(CASES[name], samples), theirs[name], TOLERANCE, record_property)


def test_the_standard_deviation_is_that_of_trl(theirs):
    for rewards, std in zip(GROUPS, theirs["stds"], strict=True):
        mean = statistics.fmean(rewards)
        want = [(r - mean) / (std + 1e-4) for r in rewards]
        # Its correction n / (n - 1) is rounded to float32. Measured: 1.5e-8.
        assert group_advantages(rewards, "grpo") == pytest.approx(want, rel=1e-7)


# Distillation.

DIVERGENCE_TOLERANCE = 4e-14  # relative, in float64; measured worst: 4.6e-15
ROWS, VOCAB, GIVEN = 11, 31, 4
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TEMPERATURES = [1.0, 0.9, 2.5]


def logits() -> tuple[Tensor, Tensor]:
    """Return the logits of a student and its teacher."""
    generator = torch.Generator().manual_seed(4)
    student = 2 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), student.detach() + 1.5 * noise


def lumped(logits_NV: Tensor, ids_NJ: Tensor, temperature: float) -> Tensor:
    log_probs = (logits_NV / temperature).log_softmax(-1)
    others = log_probs.scatter(1, ids_NJ, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids_NJ), others], dim=1)


@pytest.fixture(scope="module")
def their_divergences() -> dict[tuple[float, float, bool], Any]:
    student, teacher = logits()
    ids = teacher.topk(GIVEN).indices
    asked = {}
    for temperature in TEMPERATURES:
        for beta in BETAS:
            # Log-probs are logits of the same distribution.
            events = [lumped(each, ids, temperature).tolist() for each in (student, teacher)]
            asked[beta, temperature, False] = dict(zip(("student", "teacher"), events, strict=True))
            asked[beta, temperature, False]["options"] = {"beta": beta}
        whole = {"student": student.tolist(), "teacher": teacher.tolist()}
        options = {"beta": 0, "temperature": temperature, "top_k": GIVEN, "add_tail": True}
        asked[0.0, temperature, True] = {**whole, "options": options}
    done = run_trl("trl_distill_losses.py", given=list(asked.values()))
    return dict(zip(asked, done, strict=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("beta", "whole"), [*((beta, False) for beta in BETAS), (0.0, True)])
def test_divergence_and_gradient_are_those_of_trl(
    beta, temperature, whole, their_divergences, record_property
):
    student, teacher = logits()
    ids = teacher.topk(GIVEN).indices
    events = lumped(student, ids, temperature)
    leaf = student if whole else events.detach().requires_grad_()
    own = events if whole else leaf.log_softmax(-1)
    loss = generalized_jsd(own, lumped(teacher, ids, temperature), beta).sum()
    loss.backward()
    assert leaf.grad is not None
    want = their_divergences[beta, temperature, whole]
    check_trl(loss.detach(), leaf.grad, want, DIVERGENCE_TOLERANCE, record_property)
