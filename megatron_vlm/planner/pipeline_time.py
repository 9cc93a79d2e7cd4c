"""Seconds of every stage for every micro-batch, for any split of the layers.

Suffixes: G micro-batches, S pipeline stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.flops import Pass, Work, accumulate, micro_work
from megatron_vlm.planner.hardware import Machine
from megatron_vlm.planner.parameters import count
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.planner.schedule import Task, one_f_one_b, timeline

Split = tuple[int, ...]  # layers of each stage


@dataclass(frozen=True)
class Stages:
    """Seconds [G, S] of each stage, and from each stage to the next."""

    forward_GS: np.ndarray
    backward_GS: np.ndarray
    sent_GS: np.ndarray

    @property
    def tasks(self) -> list[Task]:
        """Every forward and backward as 1F1B orders them."""
        return timeline(self.forward_GS, self.backward_GS, self.sent_GS)

    @property
    def seconds(self) -> float:
        """Until the last backward ends."""
        if self.forward_GS.shape[1] == 1:
            return float(self.forward_GS.sum() + self.backward_GS.sum())
        return one_f_one_b(self.forward_GS, self.backward_GS, self.sent_GS)


@dataclass(frozen=True)
class ReplicaCosts:
    """One replica's micro-batches: seconds of a layer, and of what the first and the last stage do
    besides, forward and backward [G, 2]; bytes of hidden states and sets of features [G]."""

    layer_G2: np.ndarray
    first_G2: np.ndarray
    last_G2: np.ndarray
    hidden_G: np.ndarray
    features_G: np.ndarray
    bandwidth: float  # between stages

    @staticmethod
    def of(
        cfg: Config,
        sizes: ModelSizes,
        dims: ParallelDims,
        batches: Sequence[BatchSizes],
        machine: Machine,
        itemsize: int,
    ) -> "ReplicaCosts":
        """At these degrees, whatever layers `dims` has on its stages."""
        works = [micro_work(cfg, sizes, dims.tp, batch, itemsize) for batch in batches]
        layer, first, last = (
            Pass(Work(), accumulate(values, itemsize)) for values in trained(cfg, sizes, dims)
        )

        def seconds(part: Pass) -> tuple[float, float]:
            return machine.seconds(part.forward, dims.ep), machine.seconds(part.backward, dims.ep)

        return ReplicaCosts(
            np.array([seconds(work.layer + layer) for work in works]),
            np.array([seconds(work.first + first) for work in works]),
            np.array([seconds(work.last + last) for work in works]),
            np.array([work.hidden for work in works]),
            np.array([work.features for work in works]),
            machine.between(
                dims.tp * dims.dp + 1
            ),  # the next stage begins after all ranks of this one
        )

    @staticmethod
    def together(replicas: "Sequence[ReplicaCosts]") -> "ReplicaCosts":
        """Of replicas that share experts: in each layer of a micro-batch they wait for each other,
        and one that has fewer micro-batches takes part with fillers."""

        def longest(name: str) -> np.ndarray:
            parts = [getattr(replica, name) for replica in replicas]
            most = np.zeros((max(map(len, parts)), *parts[0].shape[1:]))
            for part in parts:
                most[: len(part)] = np.maximum(most[: len(part)], part)
            return most

        names = ("layer_G2", "first_G2", "last_G2", "hidden_G", "features_G")
        found: Any = {name: longest(name) for name in names}
        return replace(replicas[0], **found)

    def stages(self, split: Split) -> Stages:
        """With this many layers on each stage."""
        layers_S = np.array(split)
        found = [self.layer_G2[:, part, None] * layers_S for part in (0, 1)]
        for part in (0, 1):
            found[part][:, 0] += self.first_G2[:, part]
            found[part][:, -1] += self.last_G2[:, part]
        # Features that no layer has added yet travel with the hidden states.
        left_GS = np.maximum(0, self.features_G[:, None] - layers_S.cumsum())
        sent_GS = self.hidden_G[:, None] * (1 + left_GS) / self.bandwidth
        return Stages(found[0], found[1], sent_GS)


def trained(cfg: Config, sizes: ModelSizes, dims: ParallelDims) -> tuple[int, int, int]:
    """Values that learn on one rank: in the mean decoder layer, and besides the layers on the first
    and on the last stage."""
    pp, layers = dims.pp, sizes.text.layers

    def of(split: Split, stage: int) -> int:
        return count(cfg, sizes, replace(dims, layers_per_stage=split), stage).trained

    none = (0,) * pp
    first, last = of(none, 0), of(none, pp - 1) if pp > 1 else 0
    return (of((layers, *none[1:]), 0) - first) // layers, first, last
