"""Megatron-Core without Weights & Biases, which run/log_sinks.py imports where log.wandb is set.

megatron-core 0.16.1 imports wandb wherever it is installed. That takes a second, and makes folders
in TMPDIR that stay there when the process is killed.
"""

import importlib.abc
import sys


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
