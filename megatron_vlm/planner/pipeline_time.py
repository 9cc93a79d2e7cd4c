"""Seconds of each stage for each micro-batch, for any split of the layers.

Suffixes: G micro-batches, S pipeline stages, K kinds of layers, L decoder layers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from megatron_vlm.family.spec import TextSizes
from megatron_vlm.planner.flops import OpCount, StepCost, accumulate, decode, micro_work
from megatron_vlm.planner.hardware import Machine
from megatron_vlm.planner.layout import ModelLayout, Split
from megatron_vlm.planner.parameters import count
from megatron_vlm.planner.row_sizes import BatchSizes

# Megatron's 1F1B is simulated event by event: the time of each task of a stage, and the waits
# between.


@dataclass(frozen=True)
class Task:
    """Forward or backward of one micro-batch on one stage. Times are seconds."""

    stage: int
    forward: bool
    micro: int
    start: float
    end: float


@cache
def schedule(stage: int, stages: int, count: int) -> tuple[tuple[bool, int], ...]:
    """Return the tasks of a stage in Megatron's 1F1B: (is it a forward, which micro-batch)."""
    warm_up = min(stages - 1 - stage, count)
    steady = [((True, warm_up + i), (False, i)) for i in range(count - warm_up)]
    return (
        *((True, i) for i in range(warm_up)),
        *itertools.chain(*steady),
        *((False, i) for i in range(count - warm_up, count)),
    )


@dataclass(frozen=True)
class Stages:
    """Seconds [G, S] of each stage, and from each stage to the next, and back."""

    forward_GS: np.ndarray
    backward_GS: np.ndarray
    sent_GS: np.ndarray

    @property
    def tasks(self) -> list[Task]:
        """Forwards and backwards in the order of 1F1B."""
        seconds = {True: self.forward_GS.tolist(), False: self.backward_GS.tolist()}
        return [
            Task(stage, forward, micro, end - seconds[forward][micro][stage], end)
            for (forward, micro, stage), end in self._ends().items()
        ]

    @property
    def seconds(self) -> float:
        """Seconds until the last backward ends."""
        if self.forward_GS.shape[1] == 1:
            return float(self.forward_GS.sum() + self.backward_GS.sum())
        return max(self._ends().values())

    def _ends(self) -> dict[tuple[bool, int, int], float]:
        """Return the end of each task by (is it a forward, which micro-batch, which stage). A task
        starts when its stage is free and the neighbour has sent the input."""
        count, stages = self.forward_GS.shape
        seconds = {True: self.forward_GS.tolist(), False: self.backward_GS.tolist()}
        sent = self.sent_GS.tolist()
        ends: dict[tuple[bool, int, int], float] = {}
        orders = [schedule(stage, stages, count) for stage in range(stages)]
        places, clocks = [0] * stages, [0.0] * stages
        while len(ends) < 2 * count * stages:
            for stage, order in enumerate(orders):
                while places[stage] < len(order):
                    forward, micro = order[places[stage]]
                    neighbour = stage - 1 if forward else stage + 1
                    start = clocks[stage]
                    if 0 <= neighbour < stages:
                        if (arrives := ends.get((forward, micro, neighbour))) is None:
                            break
                        start = max(start, arrives + sent[micro][min(stage, neighbour)])
                    clocks[stage] = start + seconds[forward][micro][stage]
                    ends[forward, micro, stage] = clocks[stage]
                    places[stage] += 1
        return ends


@dataclass(frozen=True)
class ReplicaCosts:
    """Costs of one replica's micro-batches, forward and backward [G, 2]: seconds of a layer of each
    kind, and of the other work of the first and the last stage. Also bytes of hidden states and
    sets of features [G]. `before_KL` is the number of layers of each kind before layer L."""

    layer_KG2: np.ndarray
    first_G2: np.ndarray
    last_G2: np.ndarray
    hidden_G: np.ndarray
    features_G: np.ndarray
    bandwidth: float  # between stages
    before_KL: np.ndarray

    @staticmethod
    def at_degrees(
        layout: ModelLayout, batches: Sequence[BatchSizes], machine: Machine
    ) -> "ReplicaCosts":
        """Return the costs at the degrees of a layout, whose layers on its stages do not matter."""
        works, dims = [micro_work(layout, batch) for batch in batches], layout.dims
        layer, first, last = (
            StepCost(OpCount(), accumulate(counts.trained, layout.itemsize))
            + decode(layout.cfg, counts.in_blocks)
            for counts in counts_of_parts(layout)
        )
        by_kind = zip(*(work.layers for work in works), strict=True)

        def seconds(part: StepCost) -> tuple[float, float]:
            return machine.seconds(part.forward, dims.ep), machine.seconds(part.backward, dims.ep)

        return ReplicaCosts(
            np.array([[seconds(each + layer) for each in kind] for kind in by_kind]),
            np.array([seconds(work.first + first) for work in works]),
            np.array([seconds(work.last + last) for work in works]),
            np.array([work.hidden for work in works]),
            np.array([work.features for work in works]),
            # The next stage begins after all ranks of this one.
            machine.bandwidth_between(dims.tp * dims.dp + 1),
            _layers_before(layout.sizes.text),
        )

    @staticmethod
    def together(replicas: "Sequence[ReplicaCosts]") -> "ReplicaCosts":
        """Combine replicas that share experts. In each layer of a micro-batch they wait for each
        other, and a replica with fewer micro-batches takes part with fillers."""

        def longest(name: str) -> np.ndarray:
            parts = [getattr(replica, name) for replica in replicas]
            longest_shape = np.max([part.shape for part in parts], axis=0)
            maximum = np.zeros(longest_shape)
            for part in parts:
                own = maximum[tuple(map(slice, part.shape))]
                np.maximum(own, part, out=own)
            return maximum

        names = ("layer_KG2", "first_G2", "last_G2", "hidden_G", "features_G")
        costs: Any = {name: longest(name) for name in names}
        return replace(replicas[0], **costs)

    @property
    def mean_layer_seconds(self) -> float:
        """Seconds of the mean layer, over all micro-batches."""
        shares_K = self.before_KL[:, -1] / self.before_KL[:, -1].sum()
        return float(shares_K @ self.layer_KG2.sum((1, 2)))

    def stages(self, split: Split) -> Stages:
        """Return the seconds with this many layers on each stage."""
        ends_S = np.cumsum(split)
        layers_KS = np.diff(self.before_KL[:, ends_S], axis=1, prepend=0)
        seconds = [
            sum(
                layer_G2[:, part, None] * layers_S
                for layer_G2, layers_S in zip(self.layer_KG2, layers_KS, strict=True)
            )
            for part in (0, 1)
        ]
        for part in (0, 1):
            seconds[part][:, 0] += self.first_G2[:, part]
            seconds[part][:, -1] += self.last_G2[:, part]
        # Features that no layer has added yet are sent with the hidden states.
        left_GS = np.maximum(0, self.features_G[:, None] - ends_S)
        sent_GS = self.hidden_G[:, None] * (1 + left_GS) / self.bandwidth
        return Stages(seconds[0], seconds[1], sent_GS)


def _layers_before(text: TextSizes) -> np.ndarray:
    """Return [K, 1 + L]: for each kind of layer, how many of the first layers are of this kind. A
    last layer whose MLP is applied to supervised tokens alone is a kind of its own."""
    kinds, count = text.kind_of, len(text.kinds)
    if text.ends_at_places:
        kinds, count = (*kinds[:-1], count), count + 1
    is_kind_KL = [[kind == each for each in kinds] for kind in range(count)]
    return np.concatenate([np.zeros((count, 1), int), np.cumsum(is_kind_KL, 1)], 1)


class PartCounts(NamedTuple):
    """Values of a part of the model, as in ParamCounts."""

    trained: int = 0
    in_blocks: int = 0


def counts_of_parts(layout: ModelLayout) -> tuple[PartCounts, PartCounts, PartCounts]:
    """Return the counts on a rank: the mean layer's, and the rest on the first and last stage."""
    pp, layers = layout.dims.pp, layout.sizes.text.num_layers

    def of(split: Split, stage: int) -> PartCounts:
        counts = count(layout.with_layers(split), stage)
        return PartCounts(counts.trained, counts.in_blocks)

    no_layers = (0,) * pp
    first, every = of(no_layers, 0), of((layers, *no_layers[1:]), 0)
    last = of(no_layers, pp - 1) if pp > 1 else PartCounts()
    mean = PartCounts(*((a - b) // layers for a, b in zip(every, first, strict=True)))
    return mean, first, last
