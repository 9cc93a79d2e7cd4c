"""megatron_vlm: fine-tune Qwen3-VL, Qwen3.5 and Gemma 4 on Megatron-Core, equal to Hugging Face at
every layout.

__init__.pyi lists the public names. Each is imported from its module at its first use, so
`import megatron_vlm` loads neither torch nor Megatron.
"""

import os
import signal
import sys

# Until our command has a handler, Ctrl-C ends it as it ends other programs: without a traceback.
_is_command = {"megatron-vlm", "megatron_vlm.cli"} & set(map(os.path.basename, sys.orig_argv[1:3]))
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib
import logging
import warnings
from pathlib import Path

from megatron_vlm.io.megatron_imports import compile_as_called, keep_wandb_from_megatron


def _read_stub() -> dict[str, str]:
    """Return the public names with their modules: the imports of __init__.pyi."""
    text = Path(__file__).with_suffix(".pyi").read_text()
    lines = (line.split() for line in text.splitlines() if line.startswith("from "))
    return {name: module for _, module, _, name, _, _ in lines}


_HOMES = _read_stub()
__all__ = sorted(_HOMES)

# Megatron-Core warns on import and while it builds, and torch warns about the way it is called. A
# user of this package can do nothing about these warnings. Other warnings pass.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "The following imports from `dynamic_context.py`",
    "MimoModelConfig is experimental",
    "full scope is deprecated",
    r"`torch.distributed.\w+_tensor` is deprecated",
    # DistributedOptimizer looks at .grad of the parameters' shards before it sets them.
    "The .grad attribute of a Tensor that is not a leaf",
):
    warnings.filterwarnings("ignore", message=_message)
# torch says where nvcc is if there is no GPU. Nothing is compiled with it here.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# Python 3.12 and newer warn as they compile 0.19.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*/megatron/core/")

compile_as_called()
keep_wandb_from_megatron()


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    if name in ("TinySpec", "write_tiny"):  # `from megatron_vlm import` hides an AttributeError
        raise ImportError(
            f"{name} is not public any more: megatron-vlm demo tiny writes a checkpoint"
        )
    if name == "train":  # a module that can be called
        return importlib.import_module("megatron_vlm.train")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names and the names that are loaded already."""
    return sorted({*globals(), *__all__})
