# .venv/bin/python -m pytest tests/model/test_lumped_log_probs.py
"""The head for distillation gives the log-probs and gradients of the softmax in fp64, with all
tokens that are not given lumped into one event."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.model import log_probs as head
from megatron_vlm.model.lumped_log_probs import LOWEST
from megatron_vlm.model.lumped_log_probs import predict_lumped as label_and_events

TOKENS, WIDTH, VOCAB, GIVEN = 37, 24, 203, 5
# Relative to the largest value, fp32 against fp64. The measured maximum over all cases is 4.6e-6.
TOLERANCE = 2e-5


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the weight of the real vocabulary, labels, given tokens, and the
    gradient of the output. Half of the labels are given; the likeliest tokens of most places are,
    and of some places they have all of the probability in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, WIDTH, generator=generator)
    hidden[:8] *= 4
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    ids = (hidden @ weight.T).topk(GIVEN).indices
    ids[30:] = torch.stack([torch.randperm(VOCAB, generator=generator)[:GIVEN] for _ in range(7)])
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::2] = ids[::2, 1]
    return hidden, weight, labels, ids, torch.randn(TOKENS, GIVEN + 2, generator=generator)


def lump(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs of the given tokens and of all others."""
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], dim=1)


def expected(temperature: float) -> list[Tensor]:
    hidden, weight, labels, ids, grads = problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T
    label = logits.log_softmax(-1).gather(1, labels[:, None])
    output = torch.cat([label, lump((logits / temperature).log_softmax(-1), ids)], dim=1)
    output.backward(grads.double())
    assert hidden.grad is not None and weight.grad is not None
    return [output.detach(), hidden.grad, weight.grad]


def predict_lumped(*arguments: Any) -> Tensor:
    """Return the log-probs of the labels and the events next to each other."""
    labels_N, events_NR = label_and_events(*arguments)
    return torch.cat([labels_N[:, None], events_NR], dim=1)


def run(temperature: float, at_once: int) -> list[Tensor]:
    """Return our results on this rank, with the vocabulary padded to a multiple of the ranks, and
    one row more."""
    hidden, weight, labels, ids, grads = problem()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = -(-VOCAB // ranks) + 1
    padded = torch.full((rows * ranks, WIDTH), 50.0)  # the value of padding must not matter
    padded[:VOCAB] = weight
    shard = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(head, "LOGITS_AT_ONCE", at_once):
        output = predict_lumped([(hidden, shard)], labels, ids, VOCAB, group, temperature)  # type: ignore[arg-type]
        output.backward(grads)
    assert hidden.grad is not None and shard.grad is not None
    whole = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(whole, shard.grad)
    grad = torch.cat(whole)
    assert not grad[VOCAB:].any()
    return [output.detach(), hidden.grad, grad[:VOCAB]]


# One slice, two slices, uneven slices, and one column per slice.
@pytest.mark.parametrize("at_once", [2**26, TOKENS * 128, TOKENS * 30, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_equals_the_softmax_in_fp64(temperature, tp, at_once, pool, record_property):
    for results in pool.run(run, tp, temperature, at_once):
        for actual, reference in zip(results, expected(temperature), strict=True):
            error = float((actual - reference).abs().max() / reference.abs().max())
            record_property("worst", error)
            assert error <= TOLERANCE


def corners() -> None:
    """Check a frozen weight, no tokens, and given tokens that are the whole vocabulary."""
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, labels, ids, _ = problem()
    hidden.requires_grad_()
    predict_lumped([(hidden, weight)], labels, ids, VOCAB, group).sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.any()
    weight.requires_grad_()
    output = predict_lumped([(hidden[:0], weight)], labels[:0], ids[:0], VOCAB, group)
    output.sum().backward()
    assert output.shape == (0, GIVEN + 2) and weight.grad is not None and not weight.grad.any()
    everything = torch.arange(VOCAB).repeat(TOKENS, 1)
    output = predict_lumped([(hidden, weight)], labels, everything, VOCAB, group)
    output.square().sum().backward()
    want = (hidden @ weight.T).log_softmax(-1)
    assert (output[:, 1:-1] - want).abs().max() < 1e-5 and (output[:, -1] == LOWEST).all()
    assert weight.grad.isfinite().all()


def test_a_frozen_weight_no_tokens_and_the_whole_vocabulary(pool):
    pool.run(corners, 1)
