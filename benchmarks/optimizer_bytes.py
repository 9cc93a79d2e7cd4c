"""Bytes that clipping, AdamW and the copy to bf16 read and write for each weight: as operations of
torch, and as the kernel of training/fused_adamw.py. They are counted, in Triton's interpreter, so
this needs no GPU. The kernel's are the different addresses that a launch loads and those it stores.

    make fla-env && TRITON_INTERPRET=1 .venv-fla/bin/python benchmarks/optimizer_bytes.py
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton.runtime.interpreter import InterpreterBuilder

from megatron_vlm.config.optimizer_spec import STATE_NAMES, OptimizerSpec
from megatron_vlm.training.adamw import Kernel, RangedAdamW
from megatron_vlm.training.fused_adamw import fused_step

WEIGHTS = 2**14
_VIEWS = ("view", "detach", "empty", "alias", "slice", "expand", "unsqueeze", "empty_like", "t")
_FILLS = ("copy_", "fill_", "zero_")


class Operations(TorchDispatchMode):
    """The bytes of the inputs and results of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _VIEWS:
            return out
        read, written = (
            [each for each in tree_iter(of) if isinstance(each, Tensor)]
            for of in ((args, kwargs), out)
        )
        if name == "_fused_adamw_":  # weights and both moments
            written = [each for place in (0, 2, 3) for each in args[place]]
        elif name.endswith("_"):
            written = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        if name in _FILLS:
            read = [each for each in read if all(each is not other for other in written)]
        if name == "index_select":  # of a table, which stays in a cache
            read = read[1:]
        self.bytes += sum(each.nbytes for each in (*read, *written))
        self.launches += 1
        return out


class Addresses:
    """The addresses that kernels load and store in the interpreter."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, int]] = []  # addresses, and the bytes at each
        self.stored: list[tuple[Any, int]] = []
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def create_masked_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            values = load(builder, ptrs, mask, *rest)
            self._add(self.loaded, ptrs, mask, values.data.itemsize)
            return values

        def create_masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._add(self.stored, ptrs, mask, value.data.itemsize)
            return store(builder, ptrs, value, mask, *rest)

        InterpreterBuilder.create_masked_load = create_masked_load
        InterpreterBuilder.create_masked_store = create_masked_store

    @staticmethod
    def _add(found: list[tuple[Any, int]], ptrs: Any, mask: Any, size: int) -> None:
        is_live = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        found.append((ptrs.data[is_live], size))

    def take(self) -> int:
        """Return the bytes since the last call."""
        total = 0
        for found in (self.loaded, self.stored):
            for size in {size for _, size in found}:
                of_size = [addresses for addresses, each in found if each == size]
                total += size * len(np.unique(np.concatenate(of_size)))
            found.clear()
        return total


def step_of(states: str, kernel: Kernel | None) -> Callable[[], None]:
    """Return a step of a weight of a model in bf16."""
    main, model = torch.randn(WEIGHTS), torch.zeros(WEIGHTS, dtype=torch.bfloat16)
    group = {"params": [main], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    spec = OptimizerSpec("AdamW", STATE_NAMES, states)
    optimizer = RangedAdamW([group], spec, {main: 0}, kernel, {main: model})
    factor = torch.tensor(0.5)

    def step() -> None:
        main.grad = torch.randn(WEIGHTS)
        if kernel is None:
            torch._foreach_mul_([main.grad], factor)
        optimizer.step()
        if kernel is None:
            model.copy_(main)

    return step


def main() -> None:
    addresses, rows = Addresses(), {}
    for states in ("fp32", "bf16", "int8"):
        step, fused = step_of(states, None), step_of(states, fused_step)
        step()
        fused()
        addresses.take()
        with Operations() as operations:
            step()
        fused()
        made = 4 * WEIGHTS  # the gradients, which the count of operations includes
        rows[states] = {
            "operations": round((operations.bytes - made) / WEIGHTS, 1),
            "kernel": round(addresses.take() / WEIGHTS, 2),
        }
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
