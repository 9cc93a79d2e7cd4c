"""Choice of the library that multiplies fp32 matrices on the CPU.

torch uses MKL, which does without AVX-512 on AMD's processors: on a Zen 5, oneDNN is more than
twice as fast. torch uses oneDNN only if oneDNN may round the factors to bfloat16, which it does
only on processors with AMX; one test product shows whether it rounds. oneDNN takes 10 us more to
start a product, and half a millisecond for each new shape. So MKL stays for narrow models, for
experts, whose numbers of tokens change, and for the attention of short rows, whose products are
small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VENDOR = "AuthenticAMD"
MIN_WIDTH = 256  # width from which a decoder gains
LARGE_BLOCKS = 768  # number of queries from which torch's kernel takes blocks of 256, not 32 or 64
SIZE = 256  # size of the test product; torch keeps products of a few thousand operations for MKL


def enable_onednn(width: int, has_experts: bool) -> None:
    """Let oneDNN multiply if it is faster and keeps fp32. Processor and model decide, never a
    timing: a resumed run multiplies as before. This changes the whole process; its last model
    decides."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _vendor() != VENDOR:
        return
    gains = width >= MIN_WIDTH and not has_experts
    torch.set_float32_matmul_precision("medium" if gains else "highest")
    if not has_fp32_products():
        torch.set_float32_matmul_precision("highest")


def with_mkl(attention: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `attention(*inputs)`, where the first input is the queries [..., tokens, size]. If
    oneDNN is enabled and the queries are few, MKL multiplies in this call and in its backward."""
    is_large = inputs[0].shape[-2] >= LARGE_BLOCKS
    if is_large or torch.get_float32_matmul_precision() == "highest":
        return attention(*inputs)
    if torch.is_grad_enabled():
        out: Tensor = _ByMkl.apply(attention, *inputs)  # type: ignore[no-untyped-call]
        return out
    return _with_mkl(attention, *inputs)


class _ByMkl(torch.autograd.Function):
    """An autograd function with a graph of its own, so that its backward starts with MKL, too."""

    @staticmethod
    def forward(ctx: Any, attention: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            ctx.out = _with_mkl(attention, *ctx.inputs)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, out = ctx.inputs, ctx.out
        del ctx.inputs, ctx.out  # and everything that the graph keeps
        trainable = [x for x in inputs if x.requires_grad]
        grads = iter(_with_mkl(torch.autograd.grad, out, trainable, grad))
        return None, *(next(grads) if x.requires_grad else None for x in inputs)


def _with_mkl(call: Callable[..., Any], *args: Any) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return call(*args)
    finally:
        torch.set_float32_matmul_precision(before)


def has_fp32_products() -> bool:
    """Return whether a product keeps all 24 bits of its factors."""
    odd = torch.full((SIZE, SIZE), 2.0**23 + 1)
    return torch.equal(odd @ torch.eye(SIZE), odd)


def _vendor() -> str:
    """Return the processor's vendor; empty if the system does not report it, as on macOS."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    vendors = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(vendors, "")
