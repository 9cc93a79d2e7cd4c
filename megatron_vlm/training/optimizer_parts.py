"""Parts of parameters that a rank's optimizer updates.

Every optimizer of Megatron looks the same here: for each trainable parameter it has a flat part of
the fp32 main weight. The plain ones have the whole parameter, the distributed one a part of it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@dataclass(frozen=True)
class MainWeight:
    """The part of a parameter that an optimizer updates."""

    param: torch.nn.Parameter
    main: Tensor  # what the optimizer steps: the parameter itself, or an fp32 copy of its part
    optimizer: torch.optim.Optimizer
    start: int  # offset in the flattened parameter
    is_sharded: bool  # True: DP ranks have different parts; False: they all have the same one
    is_offloaded: bool = False  # the main weight is in host memory

    @property
    def model_part(self) -> Tensor:
        """The same part of the parameter, flat."""
        return self.param.detach().view(-1)[self.start : self.start + self.main.numel()]


class SplitOptimizer(torch.optim.Optimizer):
    """An optimizer of the weights on the device and one of those in host memory, in place of a
    single one. `offloaded` has the host's tensor of some of Megatron's main weights."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
        offloaded: Mapping[Tensor, Tensor],
    ):
        super().__init__([{"params": []}], {})
        self.param_groups = groups
        self.optimizers, self.offloaded = optimizers, offloaded


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that have this rank's states; none on a frozen stage."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            inner = chained.optimizer
            yield from inner.optimizers if isinstance(inner, SplitOptimizer) else (inner,)


def main_weights(
    optimizer: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts of these parameters that this rank's optimizer updates."""
    for chained in optimizer.chained_optimizers:
        for weight in megatron_weights(chained, params):
            inner = weight.optimizer
            if isinstance(inner, SplitOptimizer):
                is_offloaded = weight.main in inner.offloaded
                main = inner.offloaded.get(weight.main, weight.main)
                owner = inner.optimizers[is_offloaded]
                weight = replace(weight, main=main, optimizer=owner, is_offloaded=is_offloaded)
            yield weight


def megatron_weights(
    chained: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts of one of Megatron's optimizers, as Megatron has them."""
    if chained.is_stub_optimizer:  # a frozen stage has no optimizer
        return
    inner = chained.optimizer
    if isinstance(chained, DistributedOptimizer):
        for param, main in _sharded_mains(chained):
            start = chained._get_model_param_range_map(param)["param"].start
            yield MainWeight(param, main, inner, start, True)
        return
    mains = {main for group in inner.param_groups for main in group["params"]}
    for param in params:
        main = getattr(param, "main_param", param)
        if main in mains:
            yield MainWeight(param, main, inner, 0, False)


def _sharded_mains(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield the parameters that this rank updates a part of, each with the main weight of the part.
    Megatron's own table of places, `model_param_group_index_map` (0.16.1), is wrong for a group
    with bf16 and fp32 parameters: the group has those in fp32 first."""
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for params, main_weights in zip(models, mains, strict=True):
            yield from zip(params, main_weights, strict=True)
