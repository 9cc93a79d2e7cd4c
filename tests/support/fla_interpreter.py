# TRITON_INTERPRET=1 .venv-fla/bin/python -m tests.support.fla_interpreter
"""flash-linear-attention's own Triton kernels on the CPU, in Triton's interpreter, beside this
package's gated delta rule: the rule alone, and a whole worker with model.delta_rule=fla. It prints
what test_fla.py compares, as JSON.

The arithmetic of the kernels is their own. Their autotuner wants a device to time on, so it takes
its first configuration here. The interpreter keeps bf16 as integers of 16 bits, with which it
would compute, so that its operations get the values here. `make fla-env` has a third change.
"""

import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import autotuner, interpreter

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.model import build, delta_rule
from megatron_vlm.model.delta_rule import fla_rule, gated_delta_rule
from tests.gpu.test_parity_gpu import spawn
from tests.model.test_parity import layout
from tests.support.batches import RowSpec, make_rows
from tests.support.comparison import relative_errors
from tests.support.pool import Pool
from tests.support.reference import run_reference
from tests.support.runs import Case, Outcome, loss_and_grads

NAMES = ("out", "state", "d q", "d k", "d v", "d g", "d beta")
# name: rows, tokens, key heads, value heads, their widths, greatest decay, padded tokens
CASES = {
    **{f"{count} tokens": (1, count, 1, 2, 16, 16, 1.0, 0) for count in (1, 63, 64, 65)},
    "200 tokens, two rows": (2, 200, 2, 4, 32, 64, 1.0, 0),
    "heads of 128": (1, 65, 1, 2, 128, 128, 1.0, 0),
    "padded": (2, 100, 1, 2, 16, 16, 1.0, 37),
    "strong decay": (1, 130, 1, 2, 32, 32, 16.0, 0),  # as released models have it
}
LAYOUTS = {"1x1x1": layout(), "tp2": layout(tp=2), "pp2": layout(pp=2)}
LAYOUTS |= {"bf16": replace(layout(), train={"precision": "bf16"})}
SIZES: dict[str, Any] = dict(
    family="qwen3_5",
    head_dim=32,
    layers=2,
    full_attention_interval=2,
    vision_depth=1,
    linear_value_dim=32,
)
ROWS = (RowSpec(9, images=((4, 6),)), RowSpec(63), RowSpec(65), RowSpec(1))


def prepare_interpreter() -> None:
    """Change what the interpreter needs; see above."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())

    builder = interpreter.InterpreterBuilder
    product, cast, total = builder.create_dot, builder.cast_impl, interpreter.ReduceOps.sum
    operation, single = builder.binary_op, builder.unary_op

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, _values(a), _values(b), *rest)

    def binary_op(self: Any, one: Any, other: Any, op: Any) -> Any:
        if one.dtype.scalar != tl.bfloat16:
            return operation(self, one, other, op)
        result = operation(self, _values(one), _values(other), op)
        return _rounded(result) if result.data.dtype == np.float32 else result

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        is_rounded = (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16)
        return _rounded(source) if is_rounded else cast(self, source, target)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar != tl.bfloat16:
            return single(self, arg, op)
        return _rounded(single(self, _values(arg), op))

    def add_up(self: Any, tensor: Any) -> Any:
        if tensor.dtype.scalar != tl.bfloat16:
            return total(self, tensor)
        wide = total(self, self.to_tensor(_values(tensor.handle).data, tl.float32))
        return self.to_tensor(_rounded(wide.handle).data, tl.bfloat16)

    autotuner.Autotuner.run = run
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.binary_op, builder.unary_op = binary_op, unary_op
    interpreter.ReduceOps.sum = add_up


def _values(handle: Any) -> Any:
    """Return the fp32 values of a tensor of the interpreter in bf16, and others as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _rounded(handle: Any) -> Any:
    """Round fp32 values to bf16, as a GPU does: to the nearest."""
    bits = torch.from_numpy(np.array(handle.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)


def rule_errors(sizes: tuple[Any, ...], dtype: torch.dtype) -> dict[str, float]:
    """Return the error of each result relative to this package's in fp32 on the same inputs."""
    rows, tokens, key_heads, value_heads, key_dim, value_dim, decay, padding = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator)

    q, k, v = random(key_heads, key_dim), random(key_heads, key_dim), random(value_heads, value_dim)
    speeds = decay * torch.rand(value_heads, generator=generator)
    g = -speeds * torch.nn.functional.softplus(random(value_heads))
    beta, slope = random(value_heads).sigmoid(), random(value_heads, value_dim)
    end = torch.randn(rows, value_heads, key_dim, value_dim, generator=generator)
    if padding:  # as the prefill of a decoder has it
        for x in (g, beta, slope):
            x[:, tokens - padding :] = 0
    narrow = [x.to(dtype) for x in (q, k, v)]

    def results(rule: Callable[..., tuple[Tensor, Tensor]], wide: bool) -> list[Tensor]:
        given = [x.float() if wide else x.clone() for x in narrow] + [g.clone(), beta.clone()]
        inputs = [x.requires_grad_() for x in given]
        out, state = rule(*inputs)
        loss = (out.float() * slope).sum() + (state * end).sum()
        grads = torch.autograd.grad(loss, inputs)
        return [x.detach().float() for x in (out, state, *grads)]

    found, want = results(fla_rule, wide=False), results(gated_delta_rule, wide=True)
    largest = max(float(x.norm()) for x in want)
    # With one token nothing is decayed, so that its gradient is zero but for rounding.
    return {
        name: float((a - b).norm()) / max(float(b.norm()), 1e-3 * largest)
        for name, a, b in zip(NAMES, found, want, strict=True)
    }


def worker_with_fla(path: str, case: Case) -> Outcome:
    """Return what a worker computes with model.delta_rule=fla. A CPU is refused, so the choice
    is told that this one is a device; its own comparison of both rules takes place."""
    prepare_interpreter()
    choose = delta_rule.choose_delta_rule
    device = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    build.choose_delta_rule = lambda setting, sizes, dtype, _: choose("fla", sizes, dtype, device)
    outcome: Outcome = loss_and_grads(path, case, make_rows(ROWS, 512, 0))
    return outcome


def worker_with_torch(path: str, case: Case) -> Outcome:
    outcome: Outcome = loss_and_grads(path, case, make_rows(ROWS, 512, 0))
    return outcome


def differences(found: Outcome, want: Outcome) -> dict[str, float]:
    pairs = zip(found.log_probs, want.log_probs, strict=True)
    errors = {"loss": abs(found.loss - want.loss) / abs(want.loss)}
    errors["log-probs"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return errors | relative_errors(found.grads, want.grads)


def main() -> None:
    prepare_interpreter()
    rules = {
        f"{name}, {kind}": rule_errors(sizes, dtype)
        for name, sizes in CASES.items()
        for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    workers = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tiny")
        write_tiny(path, TinySpec(**SIZES))
        pools = Pool(spawn), Pool(spawn)  # the choice is replaced for good in one of them
        for name, case in LAYOUTS.items():
            found = pools[0].run(worker_with_fla, case.world, path, case)[0]
            want = pools[1].run(worker_with_torch, case.world, path, case)[0]
            workers[name] = differences(found, want)
            if name == "1x1x1":
                reference = run_reference(path, make_rows(ROWS, 512, 0)).loss
                workers["transformers"] = {"loss": abs(reference - want.loss) / want.loss}
        for pool in pools:
            pool.close()
    print(json.dumps({"rules": rules, "workers": workers}))


if __name__ == "__main__":
    # Processes of the pool look for its functions under the name of this module.
    importlib.import_module("tests.support.fla_interpreter").main()
