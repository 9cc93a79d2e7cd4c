"""Routing of the tokens of a micro-batch to experts.

Shapes: N tokens without padding, K experts per token, E all experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.distributed.device import to_device

# Two losses of the routers: experts should be used evenly, and logits should stay small.


@dataclass(frozen=True)
class RouterLosses:
    """Losses of one step, each a sum over the layers and tokens of the whole global batch.

    `balance_loss` is the sum of a token's probabilities [E] times `balance_E`: for each expert, E
    times the share of the tokens that go to it, over all layers and tokens; the share has no
    gradient. `z_loss` is the mean square of the logsumexp of the logits, and `mean` is the weight
    of one token in one layer. `scales` has the factor of the gradient of each active loss.
    """

    scales: Mapping[str, float]
    sums: Mapping[str, Tensor]  # values of the losses, summed over the routers of this rank so far
    mean: float
    balance_E: Tensor | None

    def add(
        self, weights_NK: Tensor, logits_NE: Tensor, probs_NE: Tensor, is_replay: bool
    ) -> Tensor:
        """Return the weights unchanged; their backward adds the gradients of the losses. A
        recomputed layer adds no value to the sums."""
        terms = {}
        if self.balance_E is not None:
            terms["balance_loss"] = (probs_NE.sum(0) * self.balance_E).sum()
        if "z_loss" in self.scales:
            terms["z_loss"] = logits_NE.float().logsumexp(-1).square().sum() * self.mean
        if not is_replay:
            for name, term in terms.items():
                self.sums[name].add_(term.detach())
        total = torch.stack([self.scales[name] * term for name, term in terms.items()]).sum()
        weights: Tensor = _AddGradient.apply(weights_NK, total)
        return weights


class _AddGradient(torch.autograd.Function):
    """x, as if a loss had been added to a result that is computed from it, which therefore does not
    have to travel to the last stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return grads[0], one


Counts = list[list[int]]  # tokens for each expert, by rank of the expert parallel group


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of experts, in turn, on the host or the device."""

    counts_E: Tensor

    @cached_property
    def on_host(self) -> list[int]:
        """The numbers; the host waits for those that are on the device."""
        numbers: list[int] = self.counts_E.tolist()
        return numbers

    def on_device(self, device: torch.device) -> Tensor:
        """Return the numbers [E] on the device, without a wait."""
        return to_device(self.counts_E, device)


@dataclass
class Routing:
    """Routing of one pass of a micro-batch through a chunk of the model: the real tokens and, by
    layer number from 1, the experts that each router has chosen for them.

    An existing choice stays. A recomputed layer therefore sends every token to the same experts as
    the first time, even if rounding changes the router's probabilities. An expert that is `given`
    replaces the router's choice, except where it is -1.
    """

    places_N: Tensor | None = None  # places of real tokens in [S * B]; None: all are real
    given: dict[int, Tensor] = field(default_factory=dict)  # [N, K], any integers
    chosen: dict[int, Tensor] = field(default_factory=dict)  # [N, K]
    sent: dict[int, RowCounts] = field(default_factory=dict)  # this rank's tokens, by expert
    counts: dict[int, Counts] = field(default_factory=dict)  # tokens of all ranks
    # Tokens whose experts are given, and how many of them the router would send elsewhere.
    rerouted: dict[int, Tensor] = field(default_factory=dict)  # [2]
    losses: RouterLosses | None = None  # losses that the routers add

    def sent_of(self, layer: int, experts: int) -> RowCounts:
        """Return the number of tokens that this rank sends to each expert, on the device."""
        if layer not in self.sent:
            chosen = self.chosen[layer].flatten().long()
            # The host would wait for the greatest number of bincount.
            local_E = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
            self.sent[layer] = RowCounts(local_E)
        return self.sent[layer]

    def counts_of(self, layer: int, group: dist.ProcessGroup) -> Counts:
        """Return the number of tokens that each rank of the group sends to each expert. The first
        call for a layer is a collective, and the host waits for the device, since shapes depend on
        these numbers."""
        if layer not in self.counts:
            local_E = self.sent[layer].counts_E
            all_E = local_E.new_empty(dist.get_world_size(group) * len(local_E))
            dist.all_gather_into_tensor(all_E, local_E, group=group)
            self.counts[layer] = all_E.view(-1, len(local_E)).tolist()
        return self.counts[layer]


def real_places(lengths: Sequence[int], tokens: int) -> Tensor:
    """Return the places [N] of the real tokens in the flattened [S * B], row by row, for rows that
    are padded on the right to `tokens`. This runs on the host."""
    real_BS = torch.arange(tokens) < torch.tensor(lengths, dtype=torch.long)[:, None]
    row_N, column_N = real_BS.nonzero(as_tuple=True)
    return column_N * len(lengths) + row_N


def route(
    hidden_NH: Tensor, weight_EH: Tensor, top_k: int, routing: Routing, layer: int
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token [N, K] and their weights, which add up to 1. As in
    transformers, probabilities of all experts are in fp32; those chosen are then normalised."""
    logits_NE = F.linear(hidden_NH, weight_EH)
    probs_NE = F.softmax(logits_NE, dim=-1, dtype=torch.float)
    is_replay = layer in routing.chosen
    if not is_replay:
        chosen_NK = choose_experts(probs_NE.detach(), top_k)
        if (override_NK := routing.given.get(layer)) is not None:
            is_given_N = override_NK[:, 0] >= 0
            differs_NK = chosen_NK.sort().values != override_NK.sort().values
            is_rerouted_N = is_given_N & differs_NK.any(-1)
            routing.rerouted[layer] = torch.stack([is_given_N.sum(), is_rerouted_N.sum()])
            chosen_NK = torch.where(override_NK < 0, chosen_NK, override_NK)
        routing.chosen[layer] = chosen_NK
    # A recomputation takes the first choice: all ranks have agreed on its counts, the shapes.
    chosen_NK = routing.chosen[layer]
    weights_NK = probs_NE.gather(1, chosen_NK)
    weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    if routing.losses is not None:
        weights_NK = routing.losses.add(weights_NK, logits_NE, probs_NE, is_replay)
    return chosen_NK, weights_NK.to(hidden_NH.dtype)


def choose_experts(probs_NE: Tensor, top_k: int) -> Tensor:
    """Return the most likely experts of each token [N, K]."""
    return probs_NE.topk(top_k, dim=-1).indices
