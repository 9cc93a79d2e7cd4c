"""Which experts the tokens of a micro-batch go to.

Shapes: N tokens, without padding, K experts of each, E all experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Losses of the routers: that experts are used evenly, and that logits stay small.
#
# Shapes: N tokens of a micro-batch, without padding, K experts of each, E all experts.


@dataclass(frozen=True)
class RouterLosses:
    """The losses of one step, each a sum over the layers and tokens of the whole global batch.

    `balance_loss` is what a token's probabilities [E] add up to with `balance_E`: of each expert
    E times the share of the tokens that go to it, which has no gradient, over all layers and
    tokens. `z_loss` is the mean square of the logsumexp of the logits, of which `mean` takes one
    token in one layer. `scales` has the factor of the gradient of each loss that is wanted.
    """

    scales: Mapping[str, float]
    sums: Mapping[str, Tensor]  # what the routers of this rank have added up: the losses' values
    mean: float
    balance_E: Tensor | None

    def add(
        self, weights_NK: Tensor, logits_NE: Tensor, probs_NE: Tensor, is_replay: bool
    ) -> Tensor:
        """The weights as they are, whose backward adds the gradients of the losses. A layer that
        is computed again adds no value to the sums."""
        terms = {}
        if self.balance_E is not None:
            terms["balance_loss"] = (probs_NE.sum(0) * self.balance_E).sum()
        if "z_loss" in self.scales:
            terms["z_loss"] = logits_NE.float().logsumexp(-1).square().sum() * self.mean
        if not is_replay:
            for name, term in terms.items():
                self.sums[name].add_(term.detach())
        total = torch.stack([self.scales[name] * term for name, term in terms.items()]).sum()
        added: Tensor = _AddGradient.apply(weights_NK, total)
        return added


class _AddGradient(torch.autograd.Function):
    """x, as if a loss had been added to whatever is computed from it: so it needs no way of its own
    to the last pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return grads[0], one


Counts = list[list[int]]  # of each rank of the expert parallel group, its tokens for each expert


@dataclass
class Routing:
    """Of one pass of a micro-batch through a chunk of the model: which of its tokens are real, and
    by layer, counted from 1, what each router has chosen for them.

    A choice that is there already is kept. So a layer that is recomputed sends every token where
    it went the first time, whatever rounding does to the router. What is `given` takes the place of
    the router's choice, but where it is -1.
    """

    places_N: Tensor | None = None  # of the real tokens in the flattened [S * B]; None: all are
    given: dict[int, Tensor] = field(default_factory=dict)  # [N, K]
    chosen: dict[int, Tensor] = field(default_factory=dict)  # [N, K]
    counts: dict[int, Counts] = field(default_factory=dict)
    losses: RouterLosses | None = None  # what the routers add to the loss

    def counts_of(self, layer: int, experts: int, group: dist.ProcessGroup) -> Counts:
        """How many tokens each rank of the group sends to each expert. A collective the first
        time: the host waits for the device, since shapes depend on these numbers."""
        if layer not in self.counts:
            mine_E = torch.bincount(self.chosen[layer].flatten(), minlength=experts)
            every_E = mine_E.new_empty(dist.get_world_size(group) * experts)
            dist.all_gather_into_tensor(every_E, mine_E, group=group)
            self.counts[layer] = every_E.view(-1, experts).tolist()
        return self.counts[layer]


def real_places(lengths: Sequence[int], tokens: int) -> Tensor:
    """Places [N] in the flattened [S * B] of the tokens of rows that are padded on the right to
    `tokens`, row by row. On the host."""
    real_BS = torch.arange(tokens) < torch.tensor(lengths, dtype=torch.long)[:, None]
    row_N, column_N = real_BS.nonzero(as_tuple=True)
    return column_N * len(lengths) + row_N


def route(
    hidden_NH: Tensor, weight_EH: Tensor, top_k: int, routing: Routing, layer: int
) -> tuple[Tensor, Tensor]:
    """The experts of each token [N, K], and their weights, which add up to 1. As in transformers:
    probabilities in fp32 over all experts, then those of the chosen ones normalised."""
    logits_NE = F.linear(hidden_NH, weight_EH)
    probs_NE = F.softmax(logits_NE, dim=-1, dtype=torch.float)
    is_replay = layer in routing.chosen
    if not is_replay:
        chosen_NK = choose_experts(probs_NE.detach(), top_k)
        if (given_NK := routing.given.get(layer)) is not None:
            chosen_NK = torch.where(given_NK < 0, chosen_NK, given_NK)
        routing.chosen[layer] = chosen_NK
    chosen_NK = routing.chosen[layer]
    weights_NK = probs_NE.gather(1, chosen_NK)
    weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    if routing.losses is not None:
        weights_NK = routing.losses.add(weights_NK, logits_NE, probs_NE, is_replay)
    return chosen_NK, weights_NK.to(hidden_NH.dtype)


def choose_experts(probs_NE: Tensor, top_k: int) -> Tensor:
    """The likeliest experts of each token [N, K]."""
    return probs_NE.topk(top_k, dim=-1).indices
