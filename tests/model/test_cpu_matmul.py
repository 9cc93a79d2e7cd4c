# .venv/bin/python -m pytest tests/model/test_cpu_matmul.py
"""The choice of the library that multiplies fp32 matrices on the CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_vlm.family import cpu_matmul
from megatron_vlm.family.tower_attention import attend_by_runs
from megatron_vlm.model.attention import SDPACoreAttention

FASTER = (
    torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu_matmul._vendor() == "AuthenticAMD"
)
MULTIPLY = """
import torch
from megatron_vlm.family.cpu_matmul import enable_onednn
enable_onednn(384, False)
torch.randn(400, 384) @ torch.randn(384, 512)
"""


@pytest.fixture(autouse=True)
def same_after() -> Iterator[None]:
    """Restore the setting, which holds for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def amd(monkeypatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    # Such a processor has no AMX, with which oneDNN would round the factors; this machine may.
    monkeypatch.setattr(cpu_matmul, "has_fp32_products", lambda: True)


def test_the_vendor_is_read():
    with open("/proc/cpuinfo") as lines:
        assert f"vendor_id\t: {cpu_matmul._vendor()}\n" in lines


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (cpu_matmul, "_vendor", "GenuineIntel"),
        (torch.backends.cpu, "get_cpu_capability", "AVX2"),
        (cpu_matmul, "has_fp32_products", False),  # what would round is put back
    ],
)
def test_other_processors_keep_mkl(amd, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, lambda: value)
    cpu_matmul.enable_onednn(384, False)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("width", "experts"), [(255, False), (256, True)])
def test_models_that_would_lose_keep_mkl(amd, width, experts):
    cpu_matmul.enable_onednn(256, False)
    assert torch.get_float32_matmul_precision() == "medium"
    cpu_matmul.enable_onednn(width, experts)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_product_that_rounds_is_noticed():
    assert cpu_matmul.has_fp32_products()
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_matmul.has_fp32_products()


@pytest.mark.skipif(not FASTER, reason="for AMD's processors with AVX-512, by /proc/cpuinfo")
def test_onednn_multiplies_without_amx():
    output = subprocess.run(
        [sys.executable, "-c", MULTIPLY],
        env={**os.environ, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    matches = [
        line for line in output.splitlines() if ",exec," in line and "400x384:384x512" in line
    ]
    assert len(matches) == 1, output
    assert "avx512_core" in matches[0] and "amx" not in matches[0], matches


class Seen(torch.autograd.Function):
    """The identity, which records the matmul precision when it runs forward and backward."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(torch.get_float32_matmul_precision())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch.get_float32_matmul_precision())
        return grad, None


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """Return the matmul precisions within attention, in the order of the calls."""
    kernel, precisions = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda query, *args, **how: kernel(Seen.apply(query, precisions), *args, **how),
    )
    return precisions


def heads(tokens: int, count: int, learns: bool = True) -> torch.Tensor:
    return torch.randn(tokens, 1, count, 16).requires_grad_(learns)


@pytest.mark.parametrize("learn", [(True, True, True), (True, False, True), (False, False, True)])
def test_attention_keeps_mkl(seen, learn):
    torch.manual_seed(0)
    inputs = [heads(33, count, does) for count, does in zip((4, 2, 2), learn, strict=True)]
    leaves = [x for x in inputs if x.requires_grad]
    attention = SDPACoreAttention(SimpleNamespace())
    expected = attention(*inputs)
    gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)
    seen.clear()

    torch.set_float32_matmul_precision("medium")
    actual = attention(*inputs)
    actual_gradients = torch.autograd.grad(actual, leaves, gradient)
    assert seen == ["highest"] * (2 if learn[0] else 1)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, actual_gradients, expected_gradients))
    with torch.no_grad():
        assert torch.equal(attention(*inputs), expected)
    assert seen[-1] == "highest" and torch.get_float32_matmul_precision() == "medium"


def test_the_towers_attention_keeps_mkl(seen):
    torch.manual_seed(0)
    inputs = [heads(28, 2)[:, 0] for _ in range(3)]
    expected = attend_by_runs(*inputs, lengths=(8, 8, 12))
    seen.clear()
    torch.set_float32_matmul_precision("medium")
    actual = attend_by_runs(*inputs, lengths=(8, 8, 12))
    actual.sum().backward()
    assert seen == ["highest"] * 4
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("tokens", "library"), [(767, "highest"), (768, "medium")])
def test_attention_of_long_rows_is_onednns(seen, tokens, library):
    torch.set_float32_matmul_precision("medium")
    attention = SDPACoreAttention(SimpleNamespace())
    attention(*(heads(tokens, count) for count in (2, 1, 1))).sum().backward()
    assert seen == [library] * 2


def test_a_kernel_that_refuses_leaves_onednn():
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(RuntimeError):
        attend_by_runs(*(torch.randn(4, 2, size) for size in (16, 8, 8)), lengths=(4,))
    assert torch.get_float32_matmul_precision() == "medium"
