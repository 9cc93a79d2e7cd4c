# .venv/bin/python -m pytest tests/model/test_delta_rule.py
"""Tests of the gated delta rule: chunks and single tokens against its definition, token by token in
fp64; and that the rule stores nothing but its inputs."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import GatedDeltaNet
from megatron_vlm.model.delta_rule import choose_delta_rule, delta_step, gated_delta_rule
from tests.support.error_fields import raises
from tests.support.reference import rule_by_token

NAMES = ("out", "state", "d q", "d k", "d v", "d a", "d beta", "d A_log")
WORST = 5e-6  # measured: 9.1e-7, for d A_log
WORST_CORRELATED = 1e-5  # measured: 1.5e-6, for d beta; with a product of powers: 1e-3 and more
HEADS = {1: (2, 2), 2: (2, 4), 3: (1, 3)}  # value heads of a key head: key heads, value heads


def by_definition(q, k, v, g, beta):
    """Return the outputs and the last state in fp64, one token after another."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return rule_by_token(q, k, v, g, beta)


def given(tokens, heads=(2, 4), decay=1.0, rows=2, seed=0):
    """Return q, k, v, a, b and A_log: what the layer has in front of the rule."""
    gen = torch.Generator().manual_seed(seed)
    key_heads, value_heads = heads
    widths = ((key_heads, 16), (key_heads, 16), (value_heads, 24), (value_heads,), (value_heads,))
    inputs = [torch.randn(rows, tokens, *width, generator=gen) for width in widths]
    return [*inputs, (torch.rand(value_heads, generator=gen) * decay + 0.01).log()]


def results(rule, inputs, dtype=torch.float):
    """Return outputs, state and the gradients of a sum that weights both."""
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    q, k, v, a, b, A_log = inputs
    out, state = rule(q, k, v, -A_log.exp() * F.softplus(a), b.sigmoid())
    gen = torch.Generator().manual_seed(1)
    weights = (torch.randn(x.shape, generator=gen).to(dtype) for x in (out, state))
    loss = sum((x * weight).sum() for x, weight in zip((out, state), weights, strict=True))
    return [out.detach(), state.detach(), *torch.autograd.grad(loss, inputs)]


def errors(found, truth, least=1e-30):
    """Return the error of each result, relative to its norm, or to `least` if the norm is less."""
    return {
        name: float((x.double() - y).norm() / y.norm().clamp(min=least))
        for name, x, y in zip(NAMES, found, truth, strict=True)
    }


@pytest.mark.parametrize("decay", [1.0, 16.0])
@pytest.mark.parametrize("values_per_key", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 300])
def test_chunks_are_the_rule_token_by_token(tokens, values_per_key, decay):
    inputs = given(tokens, HEADS[values_per_key], decay)
    truth = results(by_definition, inputs, torch.double)
    wide = results(gated_delta_rule, inputs, torch.double)
    assert max(errors(wide, truth).values()) <= 1e-14
    found = errors(results(gated_delta_rule, inputs), truth)
    assert max(found.values()) <= WORST, found


@pytest.mark.parametrize("noise", [1.0, 0.1, 0.01, 0.0])
def test_keys_that_are_nearly_equal_lose_no_digits(noise):
    """Repeated tokens and flat pictures give such keys, with hardly any decay and beta near 1. What
    the decay then gets is nearly 0 as a sum of large numbers, so that its error is absolute."""
    q, k, v, a, b, A_log = given(128)
    k = k[:, :1] + noise * k
    inputs = [q, k, v, a - 6, b + 4, torch.full_like(A_log, 0.1).log()]
    truth = results(by_definition, inputs, torch.double)
    found = errors(results(gated_delta_rule, inputs), truth, least=1.0)
    assert max(found.values()) <= WORST_CORRELATED, found


def rule_inputs(tokens, **kinds):
    """Return q, k, v, g and beta."""
    q, k, v, a, b, A_log = given(tokens, **kinds)
    return [q, k, v, -A_log.exp() * F.softplus(a), b.sigmoid()]


def test_steps_continue_the_chunks():
    inputs = rule_inputs(70)
    out, end = gated_delta_rule(*inputs)
    state = gated_delta_rule(*(x[:, :40] for x in inputs))[1]
    for t in range(40, 70):
        step, state = delta_step(*(x[:, t] for x in inputs), state)
        assert (step - out[:, t]).norm() <= 3e-6 * out[:, t].norm()
    assert (state - end).norm() <= 3e-6 * end.norm()


def test_padding_without_decay_and_beta_leaves_the_state():
    inputs = rule_inputs(77)
    inputs[3][:, 40:], inputs[4][:, 40:] = 0, 0
    alone = gated_delta_rule(*(x[:, :40] for x in inputs))[1]
    assert torch.equal(gated_delta_rule(*inputs)[1], alone)


def test_rows_do_not_see_each_other():
    inputs = given(70, rows=3)
    changed = [x.clone() for x in inputs]
    for x in changed[:5]:
        x[0] += 1
    before, after = results(gated_delta_rule, inputs), results(gated_delta_rule, changed)
    for x, y in zip(before[:-1], after[:-1], strict=True):
        assert torch.equal(x[1:], y[1:]) and not torch.equal(x[0], y[0])


def test_bf16_inputs_are_rounded_once_at_the_end():
    narrow = [x.bfloat16().requires_grad_() for x in rule_inputs(70)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    (out, state), (wide_out, wide_state) = gated_delta_rule(*narrow), gated_delta_rule(*wide)
    assert torch.equal(out, wide_out.bfloat16()) and torch.equal(state, wide_state)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(out, narrow, weight)
    for x, y in zip(grads, torch.autograd.grad(wide_out, wide, weight.float()), strict=True):
        assert torch.equal(x, y.bfloat16())


def test_nothing_but_the_inputs_is_stored():
    inputs = [x.requires_grad_() for x in rule_inputs(70)]
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: stored.append(x) or x, lambda x: x):
        gated_delta_rule(*inputs)
    assert [x.data_ptr() for x in stored] == [x.data_ptr() for x in inputs]


def test_recomputing_or_forward_alone_changes_no_digit():
    inputs = [x.requires_grad_() for x in rule_inputs(70)]
    out = gated_delta_rule(*inputs)[0]
    again = checkpoint(lambda *x: gated_delta_rule(*x)[0], *inputs, use_reentrant=True)
    with torch.no_grad():
        assert torch.equal(gated_delta_rule(*inputs)[0], out) and torch.equal(again, out)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    again.square().sum().backward()  # reentrant checkpoints refuse autograd.grad
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, grads, strict=True))


def test_a_cpu_has_this_packages_rule_and_imports_no_other():
    sizes, cpu = GatedDeltaNet(2, 4, 16, 24, 4), pick_platform("cpu")
    for setting in ("auto", "torch"):
        assert choose_delta_rule(setting, sizes, torch.float, cpu) is gated_delta_rule
    with raises(ConfigError, key="model.delta_rule", found="fla", problem_has="it needs CUDA"):
        choose_delta_rule("fla", sizes, torch.float, cpu)
    assert "fla" not in sys.modules
