# make trl-env, then .venv/bin/python -m pytest tests/training/test_trl_distill.py
"""The divergences of distillation are those of TRL's GKDTrainer over the same events, and the
forward KL is that of its IWOPDTrainer, which lumps all tokens but the teacher's likeliest ones
itself: values and gradients with respect to the student's logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.training.token_losses import generalized_jsd
from tests.support.trl import run_trl

pytestmark = [pytest.mark.slow, pytest.mark.engine("trl")]  # TRL is imported
TOLERANCE = 4e-14  # relative, in float64; measured worst: 4.6e-15
TOKENS, VOCAB, GIVEN = 11, 31, 4
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TEMPERATURES = [1.0, 0.9, 2.5]


def logits() -> tuple[Tensor, Tensor]:
    """Return the logits of a student and its teacher."""
    generator = torch.Generator().manual_seed(4)
    student = 2 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    noise = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), student.detach() + 1.5 * noise


def lumped(logits_NV: Tensor, ids_NJ: Tensor, temperature: float) -> Tensor:
    log_probs = (logits_NV / temperature).log_softmax(-1)
    others = log_probs.scatter(1, ids_NJ, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids_NJ), others], dim=1)


@pytest.fixture(scope="module")
def theirs() -> dict[tuple[float, float, bool], Any]:
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
    beta, temperature, whole, theirs, record_property
):
    student, teacher = logits()
    ids = teacher.topk(GIVEN).indices
    events = lumped(student, ids, temperature)
    leaf = student if whole else events.detach().requires_grad_()
    own = events if whole else leaf.log_softmax(-1)
    loss = generalized_jsd(own, lumped(teacher, ids, temperature), beta).sum()
    loss.backward()
    want = theirs[beta, temperature, whole]
    grad = torch.tensor(want["grad"], dtype=torch.float64)
    assert leaf.grad is not None and grad.any()
    errors = [
        abs(float(loss.detach()) - want["loss"]) / want["loss"],
        float((leaf.grad - grad).abs().max() / grad.abs().max()),
    ]
    record_property("worst", max(errors))
    assert max(errors) <= TOLERANCE, errors
