# .venv/bin/python -m pytest tests/model/test_log_probs.py
"""The head in slices of the vocabulary gives the results of the softmax over all of it."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.model import log_probs as head
from megatron_vlm.model.log_probs import predict

TOKENS, WIDTH, VOCAB = 37, 24, 203
# Relative to the largest value, fp32 against fp64. The measured maximum over all cases is 2.8e-6.
TOLERANCE = 5e-6


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the weight of the real vocabulary, targets, and gradients of both
    outputs. Tokens 0 and 1 have equal largest logits at columns 3 and 150, and the targets 3 and
    150."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    weight[3] = weight[150] = hidden[0] + hidden[1]
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[0], targets[1] = 3, 150
    targets[2:9] = (hidden @ weight.T).argmax(-1)[2:9]
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def expected(also: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the gradients of hidden states and weight, by torch in fp64."""
    hidden, weight, targets, grads = problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T
    all_log_probs = logits.log_softmax(-1)
    log_probs = all_log_probs.gather(1, targets[:, None])[:, 0]
    output = log_probs
    loss = (log_probs * grads[0]).sum()
    if also is not None:
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        if also == "entropy":
            loss = loss + (entropy * grads[1]).sum()
        hits = (logits.argmax(-1) == targets).double()
        output = torch.stack([log_probs, entropy if also == "entropy" else hits])
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return output.detach(), hidden.grad, weight.grad


def run(also: str | None, at_once: int, dtype: torch.dtype = torch.float) -> tuple[Tensor, ...]:
    """Return our results on this rank, with the vocabulary padded to a multiple of the ranks, and
    one row more."""
    hidden, weight, targets, grads = problem()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = -(-VOCAB // ranks) + 1
    padded = torch.full((rows * ranks, WIDTH), 50.0)  # the value of padding must not matter
    padded[:VOCAB] = weight
    shard = padded[rank * rows : (rank + 1) * rows].to(dtype).requires_grad_()
    hidden = hidden.to(dtype).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(head, "LOGITS_AT_ONCE", at_once):
        outputs = predict([(hidden, shard)], targets, VOCAB, group, also)  # type: ignore[arg-type]
        output = outputs[0] if outputs[1] is None else torch.stack(outputs)  # type: ignore[arg-type]
        output.backward(grads[0] if also is None else grads)
    assert hidden.grad is not None and shard.grad is not None
    whole = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(whole, shard.grad)
    grad = torch.cat(whole)
    assert not grad[VOCAB:].any()
    return output.detach(), hidden.grad, grad[:VOCAB]


def factors() -> list[Tensor]:
    """Return an input and a weight for each of two products, the second of an adapter of rank 3."""
    hidden, weight, *_ = problem()
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(TOKENS, 3, generator=generator)
    return [hidden, weight, low, torch.randn(VOCAB, 3, generator=generator)]


def expected_sum(also: str | None) -> list[Tensor]:
    """Return the output and the gradients of all four factors, by torch in fp64."""
    _, _, targets, grads = problem()
    hidden, weight, low, up = (each.double().requires_grad_() for each in factors())
    logits = hidden @ weight.T + low @ up.T
    all_log_probs = logits.log_softmax(-1)
    output = all_log_probs.gather(1, targets[:, None])[:, 0]
    loss = (output * grads[0]).sum()
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    if also == "entropy":
        loss = loss + (entropy * grads[1]).sum()
    if also is not None:
        hits = (logits.argmax(-1) == targets).double()
        output = torch.stack([output, entropy if also == "entropy" else hits])
    loss.backward()
    return [output.detach(), *(each.grad for each in (hidden, weight, low, up))]  # type: ignore[list-item]


def run_sum(also: str | None, at_once: int) -> list[Tensor]:
    """Return our results on this rank, with the weights padded as in `run`."""
    _, _, targets, grads = problem()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, shards = -(-VOCAB // ranks) + 1, []
    for place, whole in enumerate(factors()):
        if place % 2:
            padded = torch.full((rows * ranks, whole.shape[1]), 50.0)
            padded[:VOCAB] = whole
            whole = padded[rank * rows : (rank + 1) * rows]
        shards.append(whole.clone().requires_grad_())
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(head, "LOGITS_AT_ONCE", at_once):
        products = [(shards[0], shards[1]), (shards[2], shards[3])]
        outputs = predict(products, targets, VOCAB, group, also)  # type: ignore[arg-type]
        output = outputs[0] if outputs[1] is None else torch.stack(outputs)  # type: ignore[arg-type]
        output.backward(grads[0] if also is None else grads)
    results = [output.detach()]
    for place, shard in enumerate(shards):
        assert shard.grad is not None
        parts = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(parts, shard.grad)
        if place % 2:
            results.append(torch.cat(parts)[:VOCAB])
            assert not torch.cat(parts)[VOCAB:].any()
        else:  # every rank has the whole gradient
            assert all(torch.equal(part, shard.grad) for part in parts)
            results.append(shard.grad)
    return results


@pytest.mark.parametrize("at_once", [2**26, TOKENS * 30, 1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("also", [None, "entropy", "hits"])
def test_a_sum_of_products_equals_the_softmax_in_fp64(also, tp, at_once, pool, record_property):
    for results in pool.run(run_sum, tp, also, at_once):
        for actual, reference in zip(results, expected_sum(also), strict=True):
            error = float((actual - reference).abs().max() / reference.abs().max())
            record_property("worst", error)
            assert error <= TOLERANCE


# One slice, two slices, uneven slices, and one column per slice.
@pytest.mark.parametrize("at_once", [2**26, TOKENS * 128, TOKENS * 30, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("also", [None, "entropy", "hits"])
def test_equals_the_softmax_in_fp64(also, tp, at_once, pool, record_property):
    for results in pool.run(run, tp, also, at_once):
        for actual, reference in zip(results, expected(also), strict=True):
            error = float((actual - reference).abs().max() / reference.abs().max())
            record_property("worst", error)
            assert error <= TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_round_a_weights_gradient_once(tp, pool):
    """Sums of bf16 gradients of many chunks would each be rounded; the head makes one product."""
    whole = pool.run(run, tp, "entropy", 2**26, torch.bfloat16)[0]
    sliced = pool.run(run, tp, "entropy", TOKENS * 10, torch.bfloat16)[0]
    for one, many, exact in zip(whole, sliced, expected("entropy"), strict=True):
        assert (many - exact).norm() <= 1.1 * (one - exact).norm()


def count_logits(tokens: int) -> int:
    """Return the most elements that one operation makes while the head of many tokens learns."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            outputs = func(*args, **(kwargs or {}))
            largest = max(
                [largest, *(x.numel() for x in tree_leaves(outputs) if isinstance(x, Tensor))]
            )
            return outputs

    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(1000, 2, requires_grad=True)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(head, "LOGITS_AT_ONCE", 10_000), Watch():
        targets = torch.zeros(tokens, dtype=torch.long)
        outputs = predict([(hidden, weight)], targets, 1000, group, "entropy")
        torch.stack(outputs).sum().backward()  # type: ignore[arg-type]
    return largest


@pytest.mark.parametrize("tokens", [10, 100, 1000])
def test_logits_are_never_more_than_allowed(tokens, pool):
    assert pool.run(count_logits, 1, tokens) == [10_000]


def frozen_and_empty() -> None:
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, targets, _ = problem()
    hidden.requires_grad_()
    predict([(hidden, weight)], targets, VOCAB, group)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.any()
    weight.requires_grad_()
    empty = hidden[:0]
    output, _ = predict([(empty, weight)], targets[:0], VOCAB, group)
    output.sum().backward()
    assert output.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_a_frozen_weight_and_no_tokens(pool):
    pool.run(frozen_and_empty, 2)
