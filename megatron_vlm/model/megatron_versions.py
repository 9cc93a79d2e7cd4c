"""Differences between the versions of Megatron-Core that pyproject.toml allows, 0.16.1 to 0.19. All
other code is the same for each of them.

| Megatron-Core | what moved there | what stands here for it |
| --- | --- | --- |
| 0.16.1 | a layer builds its MLP from a spec, with nothing but its config | `LayerPart` |
| 0.19 | a layer calls what builds its MLP, and gives it process groups as well | `LayerPart` |
| 0.16.1 | an MLP takes a function as its activation | `ChainActivation`, which both take |
| 0.19 | an MLP builds its activation, which has to be a module | `ChainActivation` |
| 0.19 | `get_main_grads_for_grad_norm` has lost its `main` | `grads_for_norm` |
| 0.19 | `GPTModel` says at each start that `HybridModel` replaces it | a filter of the log |
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerPart:
    """Builder of a part of a decoder layer. 0.16.1 reads `module` and `params`, as in a
    ModuleSpec, and 0.19 calls it. A real ModuleSpec makes either of them warn about an MLP that is
    not its own."""

    module: type[nn.Module]
    params: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **given: Any) -> nn.Module:
        return self.module(**self.params, **given)


class LayerMLP(MLP):
    """Megatron's MLP, built from what a layer of any of the versions gives."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: Any = None,
        **_: Any,
    ):
        tp_group = pg_collection and pg_collection.tp  # without one, Megatron takes its own
        super().__init__(config, submodules, tp_group=tp_group)


class ChainActivation(nn.Module):
    """Activation of an MLP that computes a chain of model/fused_ops.py."""

    def __init__(self, chain: Callable[[Tensor], Tensor], **_: Any):
        super().__init__()
        self.chain = chain

    def forward(self, both_SB2I: Tensor) -> Tensor:
        return self.chain(both_SB2I)


def grads_for_norm(part: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients of this rank that count in the norm: each parameter counts on one rank
    only."""
    renamed = getattr(part, "get_grads_for_grad_norm", None)
    grads: list[Tensor] = renamed() if renamed else part.get_main_grads_for_grad_norm()
    return grads


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a remark of Megatron's about which its user can do nothing."""
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")


logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_news)
