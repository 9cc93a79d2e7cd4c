# .venv/bin/python -m pytest tests/model/test_fused_ops.py; the slow ones compile: -m slow
"""The small operations of a layer, compiled and eager: the same numbers, one graph for any number
of tokens, and the error where nothing can be compiled."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from megatron_vlm.distributed.device import Platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.model.fused_ops import FusedOps, compiles, missing_compiler
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.support.batches import MIXED, make_rows
from tests.support.comparison import check_worst
from tests.support.error_fields import raises
from tests.support.reference import run_reference
from tests.support.runs import Case, loss_and_grads

WIDTH, GROUPS, QUERIES, HEAD = 24, 2, 3, 8
KEY, VALUE, VALUES = 4, 6, 4  # widths of the heads of a delta net, and the number of its values
MIXED_CHANNELS = (2 * KEY, 2 * KEY, VALUES * VALUE)
CPU = Platform("cpu", torch.device("cpu"), "gloo", torch.float32)
GPU = Platform("cuda", torch.device("cuda", 0), "nccl", torch.bfloat16)
LACKING = missing_compiler(CPU)
compiling = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


def run_chains(chains: FusedOps, tokens: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs of the chains for random tensors, and the gradients of all inputs."""
    generator, inputs = torch.Generator().manual_seed(tokens), []

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        inputs.append(torch.randn(*shape, generator=generator).to(dtype).requires_grad_())
        return inputs[-1]

    x, weight = random(tokens, rows, WIDTH), random(WIDTH)
    both, of_experts = random(tokens, rows, 2 * WIDTH), random(tokens * rows, 2 * WIDTH)
    mixed = random(tokens, rows, GROUPS * (QUERIES + 2) * HEAD)
    weights = random(HEAD), random(HEAD)
    angles = random(tokens, rows, HEAD // 2).detach()
    tower_mixed, turns = random(tokens, 3 * QUERIES * HEAD), random(tokens, HEAD // 2).detach()
    turns = torch.cat([turns, turns], dim=-1)
    residual, of_tower = random(tokens, rows, WIDTH), random(1, tokens * rows, WIDTH)
    parts = [random(tokens, QUERIES * HEAD) for _ in range(3)]
    outputs_of_net = sum(MIXED_CHANNELS) + VALUES * VALUE + 2 * VALUES
    projected, filters = random(tokens, rows, outputs_of_net), random(sum(MIXED_CHANNELS), 4)
    decay, bias = random(VALUES, dtype=torch.float), random(VALUES)
    from_rule, norm_weight = random(rows, tokens, VALUES, VALUE), random(VALUE, dtype=torch.float)
    half = angles[..., : HEAD // 4]
    *net, gate, decays, betas = chains.delta_inputs(
        projected, filters, decay, bias, MIXED_CHANNELS, KEY, VALUE
    )
    outputs = [
        *net,
        decays,
        betas,
        chains.delta_outputs(from_rule, gate, norm_weight, 1e-6),
        chains.norm(x, weight, 1e-6, residual),
        *(
            each
            for values, turned in ((0, half), (2, angles))
            for each in chains.unscaled_heads(
                mixed, turned.cos(), turned.sin(), *weights, GROUPS, values // 2, 1e-6
            )
        ),
        chains.upcast_norm(of_tower, weight, 1e-6),
        chains.upcast_norm(of_tower, weight, 1e-6, of_tower),
        *chains.axial_heads(*parts, turns.cos(), turns.sin(), *weights, 1e-6),
        chains.norm(x, weight, 1e-6),
        chains.swiglu(both),
        chains.swiglu(of_experts),
        *chains.heads(mixed, angles.cos(), angles.sin(), *weights, GROUPS, 1e-6),
        *chains.tower_heads(tower_mixed, turns.cos(), turns.sin(), QUERIES),
    ]
    sum((each * each.detach().cos()).sum() for each in outputs).backward()
    grads = [each.grad for each in inputs if each.grad is not None]
    with torch.no_grad():  # as in evaluation, and in the forward of a recomputed layer
        again = chains.norm(x, weight, 1e-6)
    return [*(each.detach() for each in outputs), again, *grads]


def compare(backend: str, dtype: torch.dtype) -> tuple[float, list[int]]:
    """Return the largest difference to eager, relative to the largest value, and the number of
    graphs after each shape."""
    torch._dynamo.reset()  # the process has run other models
    counters.clear()
    worst, graphs, chains = 0.0, [], FusedOps.compile(backend)
    for tokens, rows in ((7, 2), (33, 1), (1, 5), (5, 3), (1, 1), (2, 1), (64, 4), (19, 2)):
        for actual, expected in zip(
            run_chains(chains, tokens, rows, dtype),
            run_chains(FusedOps(), tokens, rows, dtype),
            strict=True,
        ):
            assert actual.shape == expected.shape and actual.dtype is expected.dtype
            worst = max(worst, float((actual - expected).abs().max() / expected.abs().max()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"], counters["graph_break"]
    return worst, graphs


# Ten chains, one of them for heads with and without values of their own, and one again without
# gradients. Two more see rows: they are compiled for rows, a single row, and rows of one token.
GRAPHS = [13, 15, 17, 17, *[18] * 4]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_one_graph_serves_any_number_of_tokens(dtype, bar, pool):
    [(worst, graphs)] = pool.run(compare, 1, "aot_eager", dtype)
    assert worst < bar
    assert graphs == GRAPHS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_towers_heads_are_those_of_transformers(dtype):
    torch.manual_seed(0)
    mixed = torch.randn(12, 3 * QUERIES * HEAD).to(dtype)
    angles = torch.randn(12, HEAD // 2).repeat(1, 2)
    turns = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, value = mixed.unflatten(1, (3, QUERIES, HEAD)).unbind(1)
    expected = *apply_rotary_pos_emb_vision(query, key, *turns), value
    actual = FusedOps().tower_heads(mixed, *turns, QUERIES)
    assert all(
        a.dtype is dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.slow
@compiling
def test_what_is_compiled_computes_the_same(pool):
    [(worst, graphs)] = pool.run(compare, 1, "inductor", torch.float32)
    assert worst < 5e-6  # measured: 1.3e-6
    assert graphs == GRAPHS


def call_fusion() -> tuple[int, list[str], float]:
    """Return the number of graphs of a fusion of Megatron's that calls another one, the warnings of
    torch, and the relative error."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu

    torch._dynamo.reset()
    counters.clear()
    generator = torch.Generator().manual_seed(0)
    both, bias = torch.randn(6, 2 * WIDTH, generator=generator), torch.randn(2 * WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        bias_swiglu(both, bias)
        actual = bias_swiglu(both, bias)
    expected = FusedOps().swiglu(both + bias)
    error = float((actual - expected).abs().max() / expected.abs().max())
    return counters["stats"]["unique_graphs"], [str(each.message) for each in caught], error


@pytest.mark.slow
@compiling
def test_megatrons_fusions_are_compiled_as_they_are_called(pool):
    [(graphs, messages, error)] = pool.run(call_fusion, 1)
    assert (graphs, messages) == (1, [])
    assert error < 1e-6


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("cc1plus: not found\nand more")


def fails() -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        FusedOps.compile(broken).swiglu(torch.ones(2, 1, 4))
    return raised.value


def test_a_compiler_that_fails_is_a_configuration_error(pool):
    [error] = pool.run(fails, 1)
    assert error.key == "model.compile" and "model.compile=false" in error.remedy
    assert "swiglu" in error.problem and "cc1plus: not found" in error.problem


def test_what_is_lacking_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in str(missing_compiler(CPU))
    with raises(ConfigError, key="model.compile", found=True, problem_has="C++"):
        compiles(True, CPU)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert r"no C++ compiler (g++, clang++, gcc, clang)" in str(missing_compiler(CPU))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in str(missing_compiler(GPU))


def test_nothing_is_compiled_on_the_cpu_unless_asked(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not compiles(None, CPU)
    assert not compiles(False, CPU) and not compiles(False, GPU)
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr("sysconfig.get_path", lambda name: SimpleNamespace(name=name).name)
    assert "include/Python.h is missing" in str(missing_compiler(CPU))


def counted(path: str, case: Case) -> tuple[list[int], list[float]]:
    """Return graphs after each step of a worker, whose micro-batches vary in shape, and losses."""
    torch._dynamo.reset()  # the process has run other models
    counters.clear()
    worker, graphs, losses = MegatronWorker(case.config(path)), [], []
    for seed in range(3):
        losses.append(worker.forward_backward(make_rows(MIXED[seed:], seed=seed)).loss)
        worker.optim_step()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


@pytest.mark.slow
@compiling
@pytest.mark.rotate(1)
@pytest.mark.parametrize("name", ["1x1x1", "tp2-recompute", "experts-ep2"])
def test_a_compiled_model_equals_hugging_face(name, pool, tiny, record_property):
    case, path = {
        "1x1x1": (layout(), tiny()),
        "tp2-recompute": (layout(tp=2, recompute="full", recompute_vision=True), tiny()),
        "experts-ep2": (layout(dp=2, ep=2), tiny(experts=8, layers=4)),
    }[name]
    case.model["compile"] = True
    rows = make_rows(MIXED)
    outcomes = pool.run(loss_and_grads, case.world, path, case, rows)
    check_worst(errors(outcomes, run_reference(path, rows), case), TOLERANCE, record_property)
    compiled = pool.run(counted, case.world, path, case)
    case.model["compile"] = False
    eager = pool.run(counted, case.world, path, case)
    # A recomputed layer's first forward is without gradients, and there its input alone needs one:
    # its two norms are two graphs. The tower's chain has one graph.
    expected = 8 if "recompute" in name else 4
    for (graphs, losses), (none, same) in zip(compiled, eager, strict=True):
        assert graphs == [expected] * 3 and none == [0] * 3
        assert losses == pytest.approx(same, rel=1e-4)
