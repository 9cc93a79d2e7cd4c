"""Router losses of a step: their inputs before its first backward, and their values after its last.

Shapes: L decoder layers, E experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.config.schema import ModelConfig
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.device import to_device
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.model.head import Targets
from megatron_vlm.model.router import RouterLosses
from megatron_vlm.training.expert_routing import begin_count, load_of, take_counts
from megatron_vlm.training.pipeline import ForwardStep, Stage, pass_through
from megatron_vlm.training.stage_inputs import StageInput


class RouterTerms:
    """The router losses of one forward_backward: means of their own, for any divisor."""

    def __init__(
        self, model: ModelConfig, stage: Stage, batches: Sequence[MicroBatch], divisor: float | None
    ):
        coefficients = {"balance_loss": model.router_balance_loss, "z_loss": model.router_z_loss}
        self.coefficients = {name: each for name, each in coefficients.items() if each}
        self.names = tuple(self.coefficients)
        self.stage, self.batches, self.divisor = stage, batches, divisor

    def added_to(self, step: ForwardStep) -> ForwardStep:
        """Return the forward step with these losses in its routers. A collective."""
        losses = self._losses(step)
        self.sums = losses.sums

        def routed(batch: StageInput) -> StageInput:
            assert batch.routing is not None
            return replace(batch, routing=replace(batch.routing, losses=losses))

        return lambda data, chunk: step(map(routed, data), chunk)

    def _losses(self, step: ForwardStep) -> RouterLosses:
        """Return the losses for this global batch. A collective.

        The balancing loss takes an additional forward pass, with the computation of `step`. The
        share of each expert is over all layers, tokens and replicas, so it is unknown until the
        last of them has routed.
        """
        stage, batches, experts = self.stage, self.batches, self.stage.sizes.text.experts
        assert experts is not None
        # A filler has no row, so none of its tokens is real.
        tokens = sum(sum(batch.lengths) for batch in batches if batch.rows)
        weights = sum(batch.weight for batch in batches)
        all_tokens, weight = stage.grid.sum_of_replicas(tokens, weights)
        divided_by = self.divisor if self.divisor and weight else weight
        mean = 1 / (len(stage.sizes.text.expert_layers) * max(all_tokens, 1))
        balance_E, zero = None, torch.zeros((), dtype=torch.float64, device=stage.device)
        if "balance_loss" in self.coefficients:
            load_E = _load_ahead(stage, batches, step).sum(0)
            balance_E = to_device((experts.count * mean * mean * load_E).float(), stage.device)
        return RouterLosses(
            # Every gradient of the step is divided by this in the end. Without a supervised token
            # there are no gradients.
            {name: coefficient * divided_by for name, coefficient in self.coefficients.items()},
            {name: zero.clone() for name in self.coefficients},
            mean,
            balance_E,
        )

    def values(self) -> DeferredFigures:
        """Return each global loss without its coefficient, after a backward. A collective."""
        values = torch.stack([self.sums[name] for name in self.coefficients])
        dist.all_reduce(values)
        return DeferredFigures(values)


def _load_ahead(stage: Stage, batches: Sequence[MicroBatch], step: ForwardStep) -> Tensor:
    """Count the tokens of the global batch that each expert will get [L, E], in a forward pass
    without the head, in training mode: with the same dropout and the same kernels."""

    def without_head(batch: StageInput) -> StageInput:
        if batch.places_N is None or batch.targets is None:
            return batch
        none = Targets(batch.targets.ids_M[:0])
        return replace(batch, places_N=batch.places_N[:0], targets=none, columns={})

    def count(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
        return step(map(without_head, data), chunk)[0], pass_through

    begin_count(stage.chunks)
    with torch.no_grad():
        stage.run(batches, count, forward_only=True)
    counts = take_counts(stage.chunks, stage.sizes.text, stage.device)
    assert counts is not None
    return load_of(counts, stage.sizes.text)
