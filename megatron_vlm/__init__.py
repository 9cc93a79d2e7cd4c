"""megatron_vlm: fine-tune Qwen3-VL and Qwen3.5 on Megatron-Core, equal to Hugging Face at every
layout.

The names in `__all__` are the public ones. Each is imported from its module at its first use, so
`import megatron_vlm` loads neither torch nor Megatron.
"""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING

from megatron_vlm.io.megatron_imports import compile_as_called, keep_wandb_from_megatron

if TYPE_CHECKING:
    from megatron_vlm.commands.demo.coloured_shapes import (
        COLOURS,
        SHAPES,
        Scene,
        Shape,
        ShapesSpec,
        draw,
        write_shapes,
    )
    from megatron_vlm.commands.demo.tiny_model import write_tiny
    from megatron_vlm.commands.demo.tiny_spec import TinySpec
    from megatron_vlm.config import Config, load_config
    from megatron_vlm.controller import WorkerError, WorkerGroup, local_group
    from megatron_vlm.controller.ray_actors import share_ray_group, start_ray_group
    from megatron_vlm.data.tensors.tensor_batch import TensorBatch
    from megatron_vlm.data.tensors.tensor_list import TensorList
    from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
    from megatron_vlm.data.tokens.row import Row
    from megatron_vlm.data.tokens.row_maker import RowMaker
    from megatron_vlm.engines import (
        Adapter,
        Checkpoint,
        EngineSettings,
        Sampler,
        SamplerError,
        VllmSampler,
    )
    from megatron_vlm.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LostError,
        MegatronVLMError,
        TrainError,
    )
    from megatron_vlm.training.backward import StepMetrics
    from megatron_vlm.training.losses import register
    from megatron_vlm.training.optimizer import AdamStep
    from megatron_vlm.training.worker import MegatronWorker
    from megatron_vlm.user_code.environment import Environment, EnvStep

__version__ = "0.1.0"
__all__ = [
    "COLOURS",
    "SHAPES",
    "AdamStep",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "Completion",
    "Config",
    "ConfigError",
    "DataError",
    "EngineSettings",
    "EnvStep",
    "Environment",
    "LostError",
    "MegatronVLMError",
    "MegatronWorker",
    "Row",
    "RowMaker",
    "Sampler",
    "SamplerError",
    "SamplingSettings",
    "Scene",
    "Shape",
    "ShapesSpec",
    "StepMetrics",
    "TensorBatch",
    "TensorList",
    "TinySpec",
    "TrainError",
    "VllmSampler",
    "WorkerError",
    "WorkerGroup",
    "__version__",
    "draw",
    "load_config",
    "local_group",
    "register",
    "share_ray_group",
    "start_ray_group",
    "write_shapes",
    "write_tiny",
]
# Each public name belongs to the module of its import above.
_MODULES = {
    "config": ("Config", "load_config"),
    "data.tokens.row": ("Row",),
    "data.tokens.row_maker": ("RowMaker",),
    "data.tensors.tensor_batch": ("TensorBatch",),
    "data.tensors.tensor_list": ("TensorList",),
    "commands.demo.coloured_shapes": (
        *("COLOURS", "SHAPES", "Scene", "Shape", "ShapesSpec"),
        *("draw", "write_shapes"),
    ),
    "commands.demo.tiny_model": ("write_tiny",),
    "commands.demo.tiny_spec": ("TinySpec",),
    "errors": (
        *("CheckpointError", "ConfigError", "DataError"),
        *("LostError", "MegatronVLMError", "TrainError"),
    ),
    "controller": ("WorkerError", "WorkerGroup", "local_group"),
    "controller.ray_actors": ("share_ray_group", "start_ray_group"),
    "user_code.environment": ("EnvStep", "Environment"),
    "engines": (
        *("Adapter", "Checkpoint", "EngineSettings"),
        *("Sampler", "SamplerError", "VllmSampler"),
    ),
    "training.backward": ("StepMetrics",),
    "data.tokens.completions": ("Completion", "SamplingSettings"),
    "training.losses": ("register",),
    "training.optimizer": ("AdamStep",),
    "training.worker": ("MegatronWorker",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

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

if not TYPE_CHECKING:  # mypy would take a module with __getattr__ to have every name

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names and the names that are loaded already."""
    return sorted({*globals(), *__all__})
