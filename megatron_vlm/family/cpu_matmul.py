"""Which library multiplies fp32 matrices on the CPU.

torch takes MKL, which on AMD's processors does without AVX-512: on a Zen 5, oneDNN multiplies more
than twice as fast. torch asks oneDNN only where it may round the factors to bfloat16. oneDNN makes
use of that on processors with AMX alone, which AMD's are not, and multiplies in fp32 elsewhere; one
product tells whether it does.

It takes 10 us more to begin a product, and half a millisecond for each shape that is new to it. So
narrow models, and those with experts, whose tokens are others each time, keep MKL. So does the
attention of short rows, whose kernel makes a product of each small block of queries and keys.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VENDOR = "AuthenticAMD"
LEAST_WIDTH = 256  # of a decoder that gains
LARGE_BLOCKS = 768  # queries from which torch's kernel takes blocks of 256, not of 32 or 64
SIZE = 256  # of the product that tells; torch keeps those of a few thousand operations for MKL


def enable_onednn(width: int, has_experts: bool) -> None:
    """Have oneDNN multiply where it is the faster one and keeps fp32. Processor and model decide,
    never a clock: a run that is resumed multiplies as before. Changes the whole process, whose last
    model counts."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _vendor() != VENDOR:
        return
    gains = width >= LEAST_WIDTH and not has_experts
    torch.set_float32_matmul_precision("medium" if gains else "highest")
    if not has_fp32_products():
        torch.set_float32_matmul_precision("highest")


def with_mkl(attention: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`attention(*inputs)`, the first of them the queries [..., tokens, size]. Where oneDNN
    multiplies, MKL does so within it if they are few, and in its backward."""
    is_large = inputs[0].shape[-2] >= LARGE_BLOCKS
    if is_large or torch.get_float32_matmul_precision() == "highest":
        return attention(*inputs)
    if torch.is_grad_enabled():
        out: Tensor = _ByMkl.apply(attention, *inputs)  # type: ignore[no-untyped-call]
        return out
    return _with_mkl(attention, *inputs)


class _ByMkl(torch.autograd.Function):
    """Has a graph of its own for the kernel, whose backward is begun with MKL too."""

    @staticmethod
    def forward(ctx: Any, attention: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            ctx.out = _with_mkl(attention, *ctx.inputs)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, out = ctx.inputs, ctx.out
        del ctx.inputs, ctx.out  # with all that the graph keeps
        learn = [x for x in inputs if x.requires_grad]
        found = iter(_with_mkl(torch.autograd.grad, out, learn, grad))
        return None, *(next(found) if x.requires_grad else None for x in inputs)


def _with_mkl(call: Callable[..., Any], *args: Any) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return call(*args)
    finally:
        torch.set_float32_matmul_precision(before)


def has_fp32_products() -> bool:
    """Whether a product keeps all 24 bits of its factors."""
    odd = torch.full((SIZE, SIZE), 2.0**23 + 1)
    return torch.equal(odd @ torch.eye(SIZE), odd)


def _vendor() -> str:
    """Of the processor; nothing where the system does not say, as on macOS."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    of = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(of, "")
