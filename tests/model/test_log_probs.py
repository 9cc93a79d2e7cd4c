# .venv/bin/python -m pytest tests/model/test_log_probs.py
"""The heads in slices of the vocabulary give the results of the softmax over all of it in fp64: the
log-probs of targets, and for distillation those of given tokens and of all others as one event."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.model import log_probs as head
from megatron_vlm.model.head import OutputLayer, Targets, top_tokens_head
from megatron_vlm.model.log_probs import Products, predict
from megatron_vlm.model.lumped_log_probs import LOWEST, predict_lumped

TOKENS, WIDTH, VOCAB, GIVEN = 37, 24, 203, 5
CAP = 8.0  # the largest logit is above 40
# Relative to the largest value, fp32 against fp64. The measured maximum over all cases is 2.8e-6,
# and 4.6e-6 of lumped tokens.
TOLERANCE, LUMPED_TOLERANCE = 5e-6, 2e-5
# One slice, two slices, uneven slices, and one column per slice.
AT_ONCE = [2**26, TOKENS * 128, TOKENS * 30, 1]


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


def factors(products: int) -> list[Tensor]:
    """Return an input and a weight for each product. The second is that of an adapter of rank 3."""
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(TOKENS, 3, generator=generator)
    adapter = [low, torch.randn(VOCAB, 3, generator=generator)]
    return [*problem()[:2], *adapter][: 2 * products]


def pairs(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def bent(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def expected(also: str | None, products: int = 1, cap: float | None = None) -> list[Tensor]:
    """Return the output and the gradients of all factors, by torch in fp64."""
    _, _, targets, grads = problem()
    leaves = [each.double().requires_grad_() for each in factors(products)]
    logits = bent(torch.stack([given @ weight.T for given, weight in pairs(leaves)]).sum(0), cap)
    all_log_probs = logits.log_softmax(-1)
    output = all_log_probs.gather(1, targets[:, None])[:, 0]
    extra = (logits.argmax(-1) == targets).double()
    if also == "entropy":
        extra = -(all_log_probs.exp() * all_log_probs).sum(-1)
    output = output if also is None else torch.stack([output, extra])
    output.backward(grads[0] if also is None else grads)
    return [output.detach(), *(each.grad for each in leaves)]  # type: ignore[list-item]


def sharded(
    whole: Sequence[Tensor],
    output_of: Callable[[Any], Tensor],
    grads: Tensor,
    at_once: int,
    cap: float | None = None,
) -> list[Tensor]:
    """Return the output and the gradients of all factors on this rank, with the vocabulary padded
    to a multiple of the ranks, and one row more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, leaves = -(-VOCAB // ranks) + 1, []
    for place, factor in enumerate(whole):
        if place % 2:
            padded = factor.new_full((rows * ranks, factor.shape[1]), 50.0)  # must not matter
            padded[:VOCAB] = factor
            factor = padded[rank * rows : (rank + 1) * rows]
        leaves.append(factor.clone().requires_grad_())
    with mock.patch.object(head, "LOGITS_AT_ONCE", at_once):
        output = output_of(Products(pairs(leaves), cap))
        output.backward(grads)
    results = [output.detach()]
    for place, leaf in enumerate(leaves):
        assert leaf.grad is not None
        parts = [torch.empty_like(leaf) for _ in range(ranks)]
        dist.all_gather(parts, leaf.grad)
        if place % 2:
            results.append(torch.cat(parts)[:VOCAB])
            assert not torch.cat(parts)[VOCAB:].any()
        else:  # every rank has the whole gradient
            assert all(torch.equal(part, leaf.grad) for part in parts)
            results.append(leaf.grad)
    return results


def run(
    also: Any,
    at_once: int,
    products: int = 1,
    dtype: torch.dtype = torch.float,
    cap: float | None = None,
) -> Any:
    _, _, targets, grads = problem()

    def output_of(given: Any) -> Tensor:
        outputs = predict(given, targets, VOCAB, dist.group.WORLD, also)  # type: ignore[arg-type]
        return outputs[0] if outputs[1] is None else torch.stack(outputs)  # type: ignore[arg-type]

    whole = [each.to(dtype) for each in factors(products)]
    return sharded(whole, output_of, grads[0] if also is None else grads, at_once, cap)


def check(outcomes: Any, want: list[Tensor], tolerance: float, record_property: Any) -> None:
    for results in outcomes:
        for actual, reference in zip(results, want, strict=True):
            error = float((actual - reference).abs().max() / reference.abs().max())
            record_property("worst", error)
            assert error <= tolerance


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize(
    ("products", "tp", "cap"),
    [(1, 1, None), (1, 2, None), (1, 4, None), (2, 1, None), (2, 2, None), (2, 2, CAP)],
)
@pytest.mark.parametrize("also", [None, "entropy", "hits"])
def test_equals_the_softmax_in_fp64(also, products, tp, cap, at_once, pool, record_property):
    outcomes = pool.run(run, tp, also, at_once, products, torch.float, cap)
    check(outcomes, expected(also, products, cap), TOLERANCE, record_property)


def logits_with_a_cap() -> None:
    """Check all logits, and the most likely tokens, of an output layer with a cap."""
    hidden, weight, targets, _ = problem()
    group = dist.group.WORLD
    assert group is not None
    layer = OutputLayer(lambda h, weight: (h @ weight.T, None), weight, VOCAB, group, CAP)
    want = bent((hidden @ weight.T).double(), CAP)
    assert (layer.logits(hidden) - want).abs().max() < 1e-5
    top = top_tokens_head(hidden, layer, Targets(targets), count=GIVEN, temperature=2.0)
    assert top.top_log_probs_NJ is not None
    of_top = (want / 2).log_softmax(-1).topk(GIVEN).values
    assert (top.top_log_probs_NJ - of_top).abs().max() < 1e-5


def test_a_cap_bends_every_logit(pool):
    pool.run(logits_with_a_cap, 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_round_a_weights_gradient_once(tp, pool):
    """Sums of bf16 gradients of many chunks would each be rounded; the head makes one product."""
    whole = pool.run(run, tp, "entropy", 2**26, 1, torch.bfloat16)[0]
    sliced = pool.run(run, tp, "entropy", TOKENS * 10, 1, torch.bfloat16)[0]
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
        outputs = predict(Products([(hidden, weight)]), targets, 1000, group, "entropy")
        torch.stack(outputs).sum().backward()  # type: ignore[arg-type]
    return largest


@pytest.mark.parametrize("tokens", [10, 100, 1000])
def test_logits_are_never_more_than_allowed(tokens, pool):
    assert pool.run(count_logits, 1, tokens) == [10_000]


# The head for distillation.


def lumped_problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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


def expected_lumped(temperature: float, cap: float | None) -> list[Tensor]:
    hidden, weight, labels, ids, grads = lumped_problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = bent(hidden @ weight.T, cap)
    label = logits.log_softmax(-1).gather(1, labels[:, None])
    log_probs = (logits / temperature).log_softmax(-1)
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    output = torch.cat([label, log_probs.gather(1, ids), others], dim=1)
    output.backward(grads.double())
    assert hidden.grad is not None and weight.grad is not None
    return [output.detach(), hidden.grad, weight.grad]


def label_and_events(*arguments: Any) -> Tensor:
    """Return the log-probs of the labels and the events next to each other."""
    labels_N, events_NR = predict_lumped(*arguments)
    return torch.cat([labels_N[:, None], events_NR], dim=1)


def run_lumped(temperature: float, at_once: int, cap: float | None) -> list[Tensor]:
    hidden, weight, labels, ids, grads = lumped_problem()

    def output_of(products: Any) -> Tensor:
        return label_and_events(products, labels, ids, VOCAB, dist.group.WORLD, temperature)

    return sharded([hidden, weight], output_of, grads, at_once, cap)


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize(("tp", "cap"), [(1, None), (2, None), (4, None), (2, CAP)])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_lumped_tokens_equal_the_softmax_in_fp64(
    temperature, tp, cap, at_once, pool, record_property
):
    outcomes = pool.run(run_lumped, tp, temperature, at_once, cap)
    check(outcomes, expected_lumped(temperature, cap), LUMPED_TOLERANCE, record_property)


def corners() -> None:
    """Check a frozen weight, no tokens, and given tokens that are the whole vocabulary."""
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, labels, ids, _ = lumped_problem()
    hidden.requires_grad_()
    label_and_events(Products([(hidden, weight)]), labels, ids, VOCAB, group).sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.any()
    weight.requires_grad_()
    output = label_and_events(Products([(hidden[:0], weight)]), labels[:0], ids[:0], VOCAB, group)
    output.sum().backward()
    assert output.shape == (0, GIVEN + 2) and weight.grad is not None and not weight.grad.any()
    everything = torch.arange(VOCAB).repeat(TOKENS, 1)
    output = label_and_events(Products([(hidden, weight)]), labels, everything, VOCAB, group)
    output.square().sum().backward()
    want = (hidden @ weight.T).log_softmax(-1)
    assert (output[:, 1:-1] - want).abs().max() < 1e-5 and (output[:, -1] == LOWEST).all()
    assert weight.grad.isfinite().all()


def test_a_frozen_weight_no_tokens_and_the_whole_vocabulary(pool):
    pool.run(corners, 1)
