"""Transformer Engine's C++ functions, computed by torch on the CPU, and asked whether they would
take the arguments.

The real function is called in a forked process, where it may fail for want of a GPU, or crash. It
is refused only if pybind finds no overload for the arguments.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import cpp_extensions

_REFUSED = 3  # exit status


@dataclass
class Signatures:
    """Types of arguments with which functions were called, and what the extension refuses."""

    is_empty: bool  # the extension is te_empty_extension.c, which takes any call
    asked: dict[str, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    careless: list[str] = field(default_factory=list)  # they take any last argument

    def ask(self, name: str, real: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Ask about this call, if none had arguments of the same types."""
        kinds = [_kind(value) for value in args]
        kinds += [f"{key}={_kind(value)}" for key, value in kwargs.items()]
        call = f"{name}({', '.join(kinds)})"
        seen = self.asked.setdefault(name, [])
        if call in seen:
            return
        seen.append(call)
        if self.is_empty:
            return
        if is_refused(real, args, kwargs):
            self.refused.append(call)
        if args and not is_refused(real, [*args[:-1], object()], kwargs):
            self.careless.append(call)


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{' '.join(dict.fromkeys(map(_kind, value)))}]"
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def is_refused(real: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether the function has no overload for these arguments."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            real(*args, **kwargs)
        except TypeError as error:
            if "incompatible function arguments" in str(error):
                print(str(error)[:2000], file=sys.stderr, flush=True)
                os._exit(_REFUSED)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM), real
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == _REFUSED


def use_torch_arithmetic() -> Signatures:
    """Replace the functions in all of Transformer Engine's modules."""
    signatures = Signatures(is_empty=hasattr(tex, "every_name"))

    def replace(name: str, compute: Callable[..., Any]) -> None:
        real = getattr(tex, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            signatures.ask(name, real, args, kwargs)
            return compute(*args, **kwargs)

        setattr(tex, name, answer)
        for module in [m for m in sys.modules.values() if m.__name__.startswith(te.__name__)]:
            if vars(module).get(name) is real:
                setattr(module, name, answer)

    # It has all names of the extension, which an empty one does not list.
    cpp_extensions.__getattr__ = partial(getattr, tex)
    for name, compute in KERNELS.items():
        replace(name, compute)
    _pretend_that_tensors_are_on_cuda()
    return signatures


def _pretend_that_tensors_are_on_cuda() -> None:
    """Tell it Transformer Engine alone."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    count: Any = torch.arange
    # torch itself would look for cuDNN.
    tensor.is_cuda = property(lambda self: te.__name__ in sys._getframe(1).f_globals["__name__"])
    torch.arange = lambda *args, device=None, **kwargs: count(*args, **kwargs)
    cuda.device = lambda device: nullcontext()
    cuda.is_current_stream_capturing = lambda: False


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: None, quantizer: None, dtype: Any, *_: Any
) -> tuple[Tensor, None, Tensor]:
    assert out is quantizer is None
    scale = (x.float().square().mean(-1) + eps).rsqrt()
    return (x * scale[:, None] * weight).to(x.dtype), None, scale


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    normed = x.float() * scale[:, None]
    scaled = grad.float() * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def product(a: Tensor, is_a_transposed: bool, b: Tensor, is_b_transposed: bool) -> Tensor:
    """Return b times a, each transposed or not. All dimensions but the last are rows."""
    rows, weight = (x.flatten(0, -2) for x in (b, a))
    if is_b_transposed:
        return rows.T @ (weight.T if is_a_transposed else weight)
    return b @ (weight.T if is_a_transposed else weight)


def generic_gemm(
    a: Tensor,
    is_a_transposed: bool,
    b: Tensor,
    is_b_transposed: bool,
    out: Tensor | None,
    *more: Any,
    **_: Any,
) -> tuple[Tensor, None, None, None]:
    quantizer, _dtype, bias, _bias_dtype, gelu, gelu_in, _grad, _space, _size, adds, _ = more
    assert quantizer is bias is gelu_in is None and not gelu
    result = product(a, is_a_transposed, b, is_b_transposed)
    if out is not None:
        result = out.add_(result) if adds else out.copy_(result)
    return result, None, None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    is_a_transposed: bool,
    b: list[Tensor],
    is_b_transposed: bool,
    out: list[Tensor],
    dtype: Any,
    splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    is_single: bool,
    *_: Any,
) -> list[Tensor]:
    outs = out[0].split(splits) if is_single else out
    for left, right, part in zip(a, b, outs, strict=True):
        part.copy_(product(left, is_a_transposed, right, is_b_transposed))
    return bias


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the output of causal attention. All are SBND."""
    parts = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
    return out.permute(2, 0, 1, 3).contiguous()


def fused_attn_fwd(*args: Any) -> list[Tensor]:
    scale, (q, k, v) = args[3], args[13:16]
    nothing = torch.zeros(2)
    return [attend(q, k, v, scale), nothing, nothing]


def fused_attn_bwd(*args: Any) -> list[Tensor]:
    scale, (q, k, v, _, grad) = args[2], args[13:18]
    parts = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = attend(*parts, scale)
    return list(torch.autograd.grad(out, parts, grad))


def get_fused_attn_backend(is_training: bool, dtype: Any, *_: Any) -> Any:
    backends = tex.NVTE_Fused_Attn_Backend
    is_short = dtype in (tex.DType.kBFloat16, tex.DType.kFloat16)
    return backends.NVTE_F16_arbitrary_seqlen if is_short else backends.NVTE_No_Backend


def get_num_cublas_streams() -> int:
    return 4


def multi_tensor_adam(
    _chunk: int,
    _overflow: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    is_decoupled: int,
    corrects_bias: int,
    weight_decay: float,
) -> None:
    assert is_decoupled == corrects_bias == 1
    for grad, weight, mean, square in zip(*tensors, strict=True):
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad * grad, 1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (mean / (1 - beta1**step) / scale + weight_decay * weight))


KERNELS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        rmsnorm_fwd,
        rmsnorm_bwd,
        generic_gemm,
        te_general_grouped_gemm,
        get_num_cublas_streams,
        get_fused_attn_backend,
        fused_attn_fwd,
        fused_attn_bwd,
        multi_tensor_adam,
    )
}
