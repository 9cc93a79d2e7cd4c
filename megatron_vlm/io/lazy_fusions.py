"""Megatron-Core's fusions, handed to torch's compiler as they are called.

megatron-core 0.16.1 hands them over as it is imported, for which torch loads its whole compiler: a
third of the seconds until a worker is there. Only the `te` backend calls any of them.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def compile_as_called() -> None:
    """Stand in for the module in which Megatron chooses its compiler. Too late where Megatron has
    been imported already: all is then as Megatron has it."""
    jit: Any = ModuleType("megatron.core.jit")
    jit.jit_fuser = _fused
    sys.modules.setdefault("megatron.core.jit", jit)


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call; within another that is compiled, a part of that."""

    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        nonlocal compiled
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function)
        return compiled(*args, **kwargs)

    return call
