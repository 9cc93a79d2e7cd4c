"""Parts of parameters that a rank's optimizers update.

Every optimizer of Megatron looks the same here: for each trainable parameter it has a flat part of
the fp32 main weight. The plain ones have the whole parameter, the distributed one a part of it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


# Settings of a group that may change from step to step.
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class SplitOptimizer(torch.optim.Optimizer):
    """Optimizers that divide the parameters of the same groups and have their settings. `offloaded`
    has the tensors on the host that take the place of some parameters."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        members: Sequence[torch.optim.Optimizer],
        offloaded: Mapping[Tensor, Tensor] | None = None,
    ):
        """Combine optimizers whose groups are those of `groups` with a part of the parameters."""
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.members = tuple(members)
        self.offloaded = offloaded or {}

    def share_settings(self) -> None:
        """Give the members the settings of the next step."""
        for member in self.members:
            for own, group in zip(member.param_groups, self.param_groups, strict=True):
                own.update({name: group[name] for name in _SETTINGS})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        self.share_settings()
        for member in self.members:
            member.step()


def groups_with(groups: Sequence[dict[str, Any]], params: Mapping[Tensor, Tensor]) -> list[Any]:
    """Return the groups with those of their parameters that are among these, each replaced."""
    return [
        {**group, "params": [params[each] for each in group["params"] if each in params]}
        for group in groups
    ]


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that update this rank's parameters, each of them once."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:  # a frozen stage has no optimizer
            yield from _members(chained.optimizer)


def _members(inner: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    return inner.members if isinstance(inner, SplitOptimizer) else (inner,)


def main_weights(
    optimizer: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts of these parameters that this rank's optimizer updates."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            yield from main_weights_of(chained, params)


def main_weights_of(
    chained: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> Iterator[MainWeight]:
    """Yield the parts that one of Megatron's optimizers updates."""
    inner = chained.optimizer
    offloaded = inner.offloaded if isinstance(inner, SplitOptimizer) else {}
    owners = {
        main: member
        for member in _members(inner)
        for group in member.param_groups
        for main in group["params"]
    }

    def weight(param: torch.nn.Parameter, main: Tensor, start: int, sharded: bool) -> MainWeight:
        own = offloaded.get(main, main)
        return MainWeight(param, own, owners[own], start, sharded, own is not main)

    if isinstance(chained, DistributedOptimizer):
        for param, main in _sharded_mains(chained):
            start = chained._get_model_param_range_map(param)["param"].start
            yield weight(param, main, start, True)
        return
    for param in params:
        main = getattr(param, "main_param", param)
        if main in owners or main in offloaded:
            yield weight(param, main, 0, False)


def _sharded_mains(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield the parameters that this rank updates a part of, each with the main weight of the part.
    Megatron's own table, `model_param_group_index_map` (0.16.1), is wrong for a group with bf16 and
    fp32 parameters: the group has those in fp32 first."""
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for params, main_weights in zip(models, mains, strict=True):
            yield from zip(params, main_weights, strict=True)
