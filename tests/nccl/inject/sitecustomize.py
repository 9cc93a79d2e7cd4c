"""Python loads this file at the start of each process of a command. As soon as torch is imported,
its process groups have the rules of NCCL. torch.distributed is complete only after `import torch`,
which imports it."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _install() -> None:
    from tests.nccl.install import install

    install()


def _put_in_mutant() -> None:
    from tests.nccl.mutants import put_in

    put_in(os.environ["NCCL_RULES_MUTANT"])


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after the first import of a module."""

    def __init__(self, name: str, then: Any) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert isinstance(spec, ModuleSpec) and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "NCCL_RULES_PORT" in os.environ:
    sys.meta_path.insert(0, _AfterImport("torch", _install))
    if os.environ.get("NCCL_RULES_MUTANT"):
        worker = "megatron_vlm.training.worker"
        sys.meta_path.insert(0, _AfterImport(worker, _put_in_mutant))
