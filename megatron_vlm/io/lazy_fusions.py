"""Megatron-Core's fusions, which torch compiles at their first call.

megatron-core 0.16.1 hands them to torch's compiler as it is imported. torch then loads its whole
compiler, which takes a third of the seconds until a worker is ready. Only the `te` backend calls
any of them.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def compile_as_called() -> None:
    """Replace the module in which Megatron chooses its compiler. This has no effect where Megatron
    has been imported already."""
    jit: Any = ModuleType("megatron.core.jit")
    jit.jit_fuser = _compile_lazily
    sys.modules.setdefault("megatron.core.jit", jit)


def _compile_lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled at its first call. Within another compiled function it is a
    part of that one."""

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
