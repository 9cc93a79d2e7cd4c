"""megatron_vlm: fine-tune Qwen3-VL on Megatron-Core, equal to Hugging Face at every layout."""

import warnings

from megatron_vlm.fusions import compile_as_called
from megatron_vlm.no_wandb import keep_wandb_from_megatron

__version__ = "0.1.0"

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
