"""megatron_vlm: fine-tune Qwen3-VL on Megatron-Core, equal to Hugging Face at every layout.

The names in `__all__` are the public ones. Each is imported from its module when it is first used,
so `import megatron_vlm` loads neither torch nor Megatron.
"""

import importlib
import warnings
from typing import TYPE_CHECKING

from megatron_vlm.fusions import compile_as_called
from megatron_vlm.no_wandb import keep_wandb_from_megatron

if TYPE_CHECKING:
    from megatron_vlm.config import Config, load_config
    from megatron_vlm.data.encode.row import Row
    from megatron_vlm.data.encode.row_maker import RowMaker
    from megatron_vlm.data.tensors.tensor_batch import TensorBatch
    from megatron_vlm.data.tensors.tensor_list import TensorList
    from megatron_vlm.demo.shapes import (
        COLOURS,
        SHAPES,
        Scene,
        Shape,
        ShapesSpec,
        draw,
        write_shapes,
    )
    from megatron_vlm.demo.tiny import write_tiny
    from megatron_vlm.demo.tiny_spec import TinySpec
    from megatron_vlm.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LostError,
        MegatronVLMError,
        TrainError,
    )
    from megatron_vlm.group import WorkerError, WorkerGroup, local_group
    from megatron_vlm.group.ray_group import share_ray_group, start_ray_group
    from megatron_vlm.rl.environment import Environment, EnvStep
    from megatron_vlm.sampling import (
        Adapter,
        Checkpoint,
        EngineSettings,
        Sampler,
        SamplerError,
        VllmSampler,
    )
    from megatron_vlm.step.backward import StepMetrics
    from megatron_vlm.step.completions import Completion, SamplingSettings
    from megatron_vlm.step.losses import register
    from megatron_vlm.step.optimizer import AdamStep
    from megatron_vlm.worker import MegatronWorker

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
# Module of each public name, as in the imports above.
_MODULES = {
    "config": ("Config", "load_config"),
    "data.encode.row": ("Row",),
    "data.encode.row_maker": ("RowMaker",),
    "data.tensors.tensor_batch": ("TensorBatch",),
    "data.tensors.tensor_list": ("TensorList",),
    "demo.shapes": (
        *("COLOURS", "SHAPES", "Scene", "Shape", "ShapesSpec"),
        *("draw", "write_shapes"),
    ),
    "demo.tiny": ("write_tiny",),
    "demo.tiny_spec": ("TinySpec",),
    "errors": (
        *("CheckpointError", "ConfigError", "DataError"),
        *("LostError", "MegatronVLMError", "TrainError"),
    ),
    "group": ("WorkerError", "WorkerGroup", "local_group"),
    "group.ray_group": ("share_ray_group", "start_ray_group"),
    "rl.environment": ("EnvStep", "Environment"),
    "sampling": (
        *("Adapter", "Checkpoint", "EngineSettings"),
        *("Sampler", "SamplerError", "VllmSampler"),
    ),
    "step.backward": ("StepMetrics",),
    "step.completions": ("Completion", "SamplingSettings"),
    "step.losses": ("register",),
    "step.optimizer": ("AdamStep",),
    "worker": ("MegatronWorker",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

# What megatron-core 0.16.1 says on import and while it builds, and torch of how it is called:
# nothing a user of this package could act on. Other warnings pass.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "The following imports from `dynamic_context.py`",
    "full scope is deprecated",
    r"`torch.distributed.\w+_tensor` is deprecated",
    # DistributedOptimizer looks at .grad of the parameters' shards before it sets them.
    "The .grad attribute of a Tensor that is not a leaf",
):
    warnings.filterwarnings("ignore", message=_message)

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
    """List the public names beside those that are loaded already."""
    return sorted({*globals(), *__all__})
