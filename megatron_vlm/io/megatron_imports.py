"""Megatron-Core without the imports that cost seconds and that a run does not need.

megatron-core 0.16.1 hands its fusions to torch's compiler as it is imported, which loads the whole
compiler: a third of the time until a worker is ready. Only the `te` backend calls any of them, so
they are compiled at their first call. It also imports wandb wherever it is installed. That takes a
second, and leaves folders in TMPDIR when the process is killed."""

import functools
import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def compile_as_called() -> None:
    """Replace the module in which Megatron chooses its compiler, before it is imported."""
    jit: Any = ModuleType("megatron.core.jit")
    jit.jit_fuser = _compile_lazily
    sys.modules.setdefault("megatron.core.jit", jit)


def _compile_lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled at its first call or as part of its caller."""

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


def keep_wandb_from_megatron() -> None:
    """Hide wandb from Megatron; all other code may import it."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "wandb" and _importer().startswith("megatron.core"):
            raise ModuleNotFoundError("not for Megatron", name=name)


def _importer() -> str:
    """Return the module whose import statement is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _MACHINERY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


_MACHINERY = (__name__, "importlib._bootstrap", "importlib._bootstrap_external")
