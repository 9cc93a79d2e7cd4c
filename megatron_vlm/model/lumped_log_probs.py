"""Head for distillation: at each supervised place the log-prob of its label, of some given tokens,
and of all other tokens together, without the logits of the whole vocabulary at once.

The other tokens are lumped into one event, so that both models have a whole distribution over the
same events. Their probability is summed over their own logits: 1 minus the probability of the given
tokens would have no digit left in fp32 where the given tokens have nearly all of it.

Shapes: N supervised places, J given tokens of a place, R the J + 1 events (the given tokens, then
all others), M the N * J given tokens of all places, I width of an input, V this rank's part of the
padded vocabulary, v a slice of V.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.model.log_probs import (
    Products,
    VocabShard,
    factor_gradients,
    factor_pairs,
    logits_of,
    part_of,
    slices,
)

# No log-prob that fp32 can sum with others is lower. It stands for the log of 0, which would make
# NaNs of products with 0: where the given tokens are the whole vocabulary, no other token is left.
LOWEST = -1e4


def predict_lumped(
    products: Products,
    labels_N: Tensor,
    ids_NJ: Tensor,
    vocab: int,
    tp_group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return, from the logits of these products, the log-prob of each place's label
    [N] at temperature 1 and the log-probs of its events [N, R] at this temperature, both in fp32.
    The given tokens of a place differ; a label may be one of them."""
    assert ids_NJ.shape[0] == len(labels_N) and temperature > 0
    first, valid = part_of(products, vocab, tp_group)
    of_M = torch.arange(len(ids_NJ), device=ids_NJ.device).repeat_interleave(ids_NJ.shape[1])
    columns = VocabShard(labels_N - first, None), VocabShard(ids_NJ.flatten() - first, of_M)
    outputs: tuple[Tensor, Tensor] = _PredictLumped.apply(
        columns, ids_NJ.shape, valid, tp_group, temperature, products.cap, *products.flat
    )
    return outputs


class _LogSum:
    """Log of a running sum of e^logit at each place."""

    def __init__(self, like_N: Tensor):
        # Not -inf: a slice whose tokens are all given is hidden whole, and -inf - -inf is NaN.
        self.highest_N = torch.full_like(like_N, torch.finfo(torch.float).min)
        self.total_N = torch.zeros_like(like_N)

    def add(self, logits_Nv: Tensor) -> Tensor:
        """Add a slice, which is overwritten by e^(logit - largest so far), and return it."""
        highest_N = torch.maximum(self.highest_N, logits_Nv.amax(dim=1))
        exp_Nv = logits_Nv.sub_(highest_N[:, None]).exp_()
        self.total_N = self.total_N * (self.highest_N - highest_N).exp() + exp_Nv.sum(dim=1)
        self.highest_N = highest_N
        return exp_Nv

    def gather(self, group: dist.ProcessGroup) -> None:
        """Combine the sums of the whole vocabulary on every rank."""
        highest_N = self.highest_N.clone()
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        self.total_N = self.total_N * (self.highest_N - highest_N).exp()
        self.highest_N = highest_N
        dist.all_reduce(self.total_N, group=group)

    def log_relative_to(self, base_N: Tensor | float) -> Tensor:
        """Return the log of the sum divided by e^base."""
        smallest = torch.finfo(torch.float).tiny
        return self.highest_N - base_N + self.total_N.clamp(min=smallest).log()


class _PredictLumped(torch.autograd.Function):
    """The log-probs with an explicit gradient, as in `predict`."""

    @staticmethod
    def forward(
        ctx: Any,
        columns: tuple[VocabShard, VocabShard],
        shape: torch.Size,
        valid: int,
        group: dist.ProcessGroup,
        temperature: float,
        cap: float | None,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (labels, given), places = columns, shape[0]
        products = Products(factor_pairs(factors), cap)
        label_N = torch.zeros(places, dtype=torch.float, device=factors[0].device)
        given_M = label_N.new_zeros(len(given.column_M))
        others, everything = _LogSum(label_N), _LogSum(label_N)
        ctx.slices = list(slices(places, valid))
        ctx.columns, ctx.group, ctx.temperature, ctx.cap = columns, group, temperature, cap
        exp_Nv = None
        for start, end in ctx.slices:
            logits_Nv = logits_of(products, start, end)
            label_N = labels.pick(logits_Nv, start, label_N)
            if temperature != 1:
                everything.add(logits_Nv.clone())
                logits_Nv /= temperature
            given_M = given.pick(logits_Nv, start, given_M)
            exp_Nv = others.add(given.hide(logits_Nv, start))
        shares_Nv = None  # stored if one slice holds all of them, else recomputed
        if exp_Nv is not None and len(ctx.slices) == 1 and temperature == 1 and cap is None:
            shares_Nv = exp_Nv if any(ctx.needs_input_grad) else None
        local_highest_N = others.highest_N
        others.gather(group)
        others_sum_N = others.log_relative_to(0)
        if shares_Nv is not None:
            shares_Nv.mul_((local_highest_N - others_sum_N).exp()[:, None])
        picked = torch.cat([label_N, given_M])
        dist.all_reduce(picked, group=group)
        label_N, given_NJ = picked[:places], picked[places:].view(shape)
        # The largest logit is subtracted first: with the sum, its own digits would be rounded away.
        highest_N = torch.maximum(others.highest_N, given_NJ.amax(dim=1))
        others_N = others.log_relative_to(highest_N)
        events_NR = torch.cat([given_NJ - highest_N[:, None], others_N[:, None]], dim=1)
        log_total_N = events_NR.logsumexp(dim=1)
        log_probs_NR = (events_NR - log_total_N[:, None]).clamp_(min=LOWEST)
        label_sum_N = None
        if temperature == 1:
            label_N = label_N - highest_N - log_total_N
        else:
            everything.gather(group)
            label_sum_N = everything.log_relative_to(0)
            label_N = label_N - everything.highest_N
            label_N = label_N - everything.log_relative_to(everything.highest_N)
        ctx.save_for_backward(log_probs_NR, others_sum_N, label_sum_N, shares_Nv, *factors)
        return label_N, log_probs_NR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient. With g the gradients of the events' log-probs, G their sum and p
        the probabilities, a given token's logit has g - p G, and the logits of all others share
        g - p G in proportion to their probabilities."""
        log_probs_NR, others_sum_N, label_sum_N, stored_Nv, *factors = ctx.saved_tensors
        (labels, given), temperature = ctx.columns, ctx.temperature
        label_grad_N, grad_NR = grads
        total_N = grad_NR.sum(dim=1)
        if label_sum_N is None:  # at temperature 1 the label's log-prob is of the same softmax
            total_N = total_N + label_grad_N
        slope_NR = (grad_NR - log_probs_NR.exp() * total_N[:, None]) / temperature

        def slope_of(shares_Nv: Tensor, start: int) -> Tensor:
            label_slope_Nv = None
            if stored_Nv is None:
                if label_sum_N is not None:
                    label_slope_Nv = (shares_Nv - label_sum_N[:, None]).exp_()
                    label_slope_Nv.mul_(-label_grad_N[:, None])
                    shares_Nv /= temperature
                shares_Nv = given.hide(shares_Nv, start).sub_(others_sum_N[:, None]).exp_()
            slope_Nv = shares_Nv.mul_(slope_NR[:, -1:])
            given.add(slope_Nv, start, slope_NR[:, :-1].flatten())
            labels.add(slope_Nv, start, label_grad_N)
            return slope_Nv if label_slope_Nv is None else slope_Nv.add_(label_slope_Nv)

        products = Products(factor_pairs(factors), ctx.cap)
        return *(None,) * 6, *factor_gradients(ctx, products, stored_Nv, slope_of)
