"""Losses of the routers: that experts are used evenly, and that logits stay small.

Shapes: N tokens of a micro-batch, without padding, K experts of each, E all experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
