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
from megatron_vlm.model.router import RouterLosses
from megatron_vlm.training.expert_routing import begin_count, take_expert_load
from megatron_vlm.training.pipeline import ForwardStep, Stage, pass_through
from megatron_vlm.training.stage_inputs import StageInput


def router_losses(
    model: ModelConfig,
    stage: Stage,
    batches: Sequence[MicroBatch],
    step: ForwardStep,
    divisor: float | None = None,
) -> RouterLosses | None:
    """Return the router losses of the configuration for this global batch, or None if it has none.
    They are means of their own, independent of the divisor of the summed loss. A collective.

    The balancing loss takes an additional forward pass, with the computation of `step`. The share
    of each expert is over all layers, tokens and replicas, so it is unknown until the last of them
    has routed.
    """
    coefficients = {"balance_loss": model.router_balance_loss, "z_loss": model.router_z_loss}
    coefficients = {name: coefficient for name, coefficient in coefficients.items() if coefficient}
    experts = stage.sizes.text.experts
    if experts is None or not coefficients:
        return None
    # A filler has no row, so none of its tokens is real.
    tokens = sum(sum(batch.lengths) for batch in batches if batch.rows)
    counts = torch.tensor([tokens, sum(batch.weight for batch in batches)], dtype=torch.float64)
    total = to_device(counts, stage.device)
    dist.all_reduce(total, group=stage.grid.dp.group)
    all_tokens, weight = total.tolist()
    divided_by = divisor if divisor and weight else weight
    mean = 1 / (len(stage.sizes.text.expert_layers) * max(all_tokens, 1))
    balance_E = None
    if "balance_loss" in coefficients:
        load_E = _load_ahead(stage, batches, step).sum(0)
        balance_E = to_device((experts.count * mean * mean * load_E).float(), stage.device)
    return RouterLosses(
        # Every gradient of the step is divided by this in the end. Without a supervised token there
        # are no gradients.
        {name: coefficient * divided_by for name, coefficient in coefficients.items()},
        {name: torch.zeros((), dtype=torch.float64, device=stage.device) for name in coefficients},
        mean,
        balance_E,
    )


def _load_ahead(stage: Stage, batches: Sequence[MicroBatch], step: ForwardStep) -> Tensor:
    """Count the tokens of the global batch that each expert will get [L, E], in a forward pass
    without the head. The pass runs in training mode, to have the same dropout and the same
    kernels."""

    def without_head(batch: StageInput) -> StageInput:
        if batch.places_N is None or batch.targets_M is None:
            return batch
        return replace(batch, places_N=batch.places_N[:0], targets_M=batch.targets_M[:0], of_M=None)

    def count(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
        return step(map(without_head, data), chunk)[0], pass_through

    begin_count(stage.chunks)
    with torch.no_grad():
        stage.run(batches, count, forward_only=True)
    load_LE = take_expert_load(stage.chunks, stage.sizes.text, stage.device)
    assert load_LE is not None
    return load_LE


def with_losses(step: ForwardStep, losses: RouterLosses | None) -> ForwardStep:
    """Return a forward step whose routers add these losses."""
    if losses is None:
        return step

    def routed(batch: StageInput) -> StageInput:
        assert batch.routing is not None
        return replace(batch, routing=replace(batch.routing, losses=losses))

    return lambda data, chunk: step(map(routed, data), chunk)


def values_of(losses: RouterLosses | None) -> dict[str, float]:
    """Return each loss without its coefficient, over the global batch. A collective of all
    ranks."""
    if losses is None:
        return {}
    values = torch.stack([losses.sums[name] for name in losses.scales])
    dist.all_reduce(values)
    return dict(zip(losses.scales, values.tolist(), strict=True))
