"""Log-probs of targets, without the logits of all places and tokens at once.

Where there would be too many logits, they are computed one slice of the vocabulary after the other,
and again in the backward pass. Slices of the vocabulary, unlike chunks of tokens, leave the
gradient of each weight a single matrix product.

The logits are a sum of products of an input and a weight: the hidden states and the head's own
weight and, where the head has an adapter, the output of its A and its B.

Shapes: N supervised places, M targets (equal to N, unless places have several targets), I width of
an input, V this rank's part of the padded vocabulary, v a slice of V.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

LOGITS_AT_ONCE = 2**26  # 256 MiB in fp32 on each rank
Extra = Literal["entropy", "hits"]
Factors = tuple[Tensor, Tensor]  # an input [N, I] and a weight [V, I]: logits are input @ weight.T


@dataclass(frozen=True)
class Products:
    """Products whose sum is the logits, which a cap bends: cap * tanh(sum / cap)."""

    factors: Sequence[Factors]
    cap: float | None = None

    @property
    def flat(self) -> list[Tensor]:
        """The inputs and weights, one after the other."""
        return [factor for pair in self.factors for factor in pair]


def part_of(products: Products, vocab: int, tp_group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the first token of this rank's part of the vocabulary and the length of the part."""
    rows = len(products.factors[0][1])
    first = dist.get_rank(tp_group) * rows
    return first, min(max(vocab - first, 0), rows)


def logits_of(products: Products, start: int, end: int) -> Tensor:
    """Return the logits [N, v] of a slice of this rank's part of the vocabulary, summed in fp32."""
    (hidden_NH, weight_VH), *others = products.factors
    logits_Nv = (hidden_NH @ weight_VH[start:end].T).float()
    for input_NI, weight_VI in others:
        _add_product(logits_Nv, input_NI, weight_VI[start:end].T)
    cap = products.cap
    return logits_Nv if cap is None else logits_Nv.div_(cap).tanh_().mul_(cap)


class VocabShard:
    """Columns of the targets in this rank's part of the vocabulary; other ranks have the rest."""

    def __init__(self, column_M: Tensor, of_M: Tensor | None):
        self.column_M, self.of_M = column_M, of_M

    def per_target(self, values_N: Tensor) -> Tensor:
        """Return the value of each target's place."""
        return values_N if self.of_M is None else values_N[self.of_M]

    def per_place(self, values_M: Tensor, places: int) -> Tensor:
        """Return the sum over the targets of each place."""
        if self.of_M is None:
            return values_M
        return values_M.new_zeros(places).index_add_(0, self.of_M, values_M)

    def pick(self, logits_Nv: Tensor, start: int, before_M: Tensor) -> Tensor:
        """Return the targets' logits; a target outside this slice keeps its value in `before`."""
        inside_M, place_M = self._targets_in_slice(logits_Nv, start)
        return torch.where(inside_M, logits_Nv.flatten()[place_M], before_M)

    def add(self, slope_Nv: Tensor, start: int, values_M: Tensor) -> Tensor:
        """Add each target's value to its logit in place, where the target is in this slice."""
        inside_M, place_M = self._targets_in_slice(slope_Nv, start)
        slope_Nv.view(-1).index_add_(0, place_M, values_M * inside_M)
        return slope_Nv

    def hide(self, logits_Nv: Tensor, start: int) -> Tensor:
        """Set the targets' logits in place to minus infinity, where the target is in this slice."""
        inside_M, place_M = self._targets_in_slice(logits_Nv, start)
        # A target outside has its place clamped onto another token's logit, which +inf spares.
        bound_M = torch.full_like(place_M, torch.inf, dtype=logits_Nv.dtype)
        bound_M.masked_fill_(inside_M, -torch.inf)
        logits_Nv.view(-1).scatter_reduce_(0, place_M, bound_M, "amin")
        return logits_Nv

    def _targets_in_slice(self, slice_Nv: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return a mask of the targets in the slice, and each target's place in the flat slice."""
        width, column_M = slice_Nv.shape[1], self.column_M - start
        of_M = self.of_M
        if of_M is None:
            of_M = torch.arange(len(column_M), device=column_M.device)
        inside_M = (column_M >= 0) & (column_M < width)
        return inside_M, of_M * width + column_M.clamp(0, width - 1)


def slices(tokens: int, valid: int) -> Iterator[tuple[int, int]]:
    """Return even ranges of a rank's part of the vocabulary, narrow enough that this number of
    tokens has few enough logits."""
    width = max(LOGITS_AT_ONCE // max(tokens, 1), 1)
    count = -(-valid // width)
    return ((i * valid // count, (i + 1) * valid // count) for i in range(count))


def factor_gradients(
    ctx: Any,
    products: Products,
    stored_Nv: Tensor | None,
    slope_of: Callable[[Tensor, int], Tensor],
) -> list[Tensor | None]:
    """Return the gradient of each factor that needs one. `slope_of` returns the gradient [N, v] of
    the logits of a slice, from what the forward stored or else from these logits. Gradients of
    inputs are summed over all ranks, as each has only its part of the weight."""
    pairs, cap, grads = products.factors, products.cap, []
    assert stored_Nv is None or cap is None, "the slope of a cap needs the logits"
    needed = factor_pairs(ctx.needs_input_grad[-2 * len(pairs) :])
    for (input_NI, weight_VI), (of_input, of_weight) in zip(pairs, needed, strict=True):
        grad_NI = torch.zeros_like(input_NI, dtype=torch.float) if of_input else None
        grads.append((grad_NI, torch.zeros_like(weight_VI) if of_weight else None))
    for start, end in ctx.slices:
        logits_Nv = logits_of(products, start, end) if stored_Nv is None else stored_Nv
        bend_Nv = None if cap is None else 1 - (logits_Nv / cap).square()
        slope_Nv = slope_of(logits_Nv, start)
        if bend_Nv is not None:
            slope_Nv = slope_Nv.mul_(bend_Nv)
        slope_Nv = slope_Nv.to(pairs[0][0].dtype)
        for (input_NI, weight_VI), (grad_NI, grad_VI) in zip(pairs, grads, strict=True):
            if grad_NI is not None:
                _add_product(grad_NI, slope_Nv, weight_VI[start:end])
            if grad_VI is not None:
                torch.mm(slope_Nv.T, input_NI, out=grad_VI[start:end])
    result = []
    for (input_NI, _), (grad_NI, grad_VI) in zip(pairs, grads, strict=True):
        if grad_NI is not None:
            dist.all_reduce(grad_NI, group=ctx.group)
            grad_NI = grad_NI.to(input_NI.dtype)
        result += [grad_NI, grad_VI]
    return result


def factor_pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return a flat list of inputs and weights by product."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the total, summed in fp32 for any dtype of the two."""
    if right.dtype is torch.float:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def predict(
    products: Products,
    targets_M: Tensor,
    vocab: int,
    tp_group: dist.ProcessGroup,
    extra: Extra | None = None,
    of_M: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target [M] in fp32, from the logits of these products, and the
    extra [N]: the entropy of each distribution in nats, or 1 where the target is
    the most likely token. Rows of the weights past the real vocabulary get no probability. `of_M`
    is the place of each target where places have several, which allows no extra. A `temperature`
    other than 1 allows no backward pass."""
    assert extra is None or of_M is None
    assert temperature == 1 or not torch.is_grad_enabled()
    first, valid = part_of(products, vocab, tp_group)
    columns = VocabShard(targets_M - first, of_M)
    given = columns, valid, tp_group, extra, temperature, products.cap, *products.flat
    return _Predict.apply(*given)  # type: ignore[no-any-return]


class _Softmax:
    """Running statistics of each place's distribution over the slices so far: the largest logit,
    its column, the targets' logits, and the sums of e^x and x e^x, where x = logit - largest."""

    def __init__(self, columns: VocabShard, places: int, extra: Extra | None):
        self.columns, self.extra = columns, extra
        zeros_N = torch.zeros(places, dtype=torch.float, device=columns.column_M.device)
        # Not -inf: on a rank that holds padding alone, `rescale` would multiply it by 0, a NaN.
        self.highest_N = torch.full_like(zeros_N, torch.finfo(torch.float).min)
        self.best_N = torch.full_like(zeros_N, -1, dtype=torch.long)
        self.picked_M = zeros_N.new_zeros(len(columns.column_M))
        self.total_N, self.weighted_N = zeros_N, zeros_N

    def add(self, logits_Nv: Tensor, start: int) -> Tensor:
        """Add a slice, which is overwritten by e^(logit - largest so far), and return it."""
        self.picked_M = self.columns.pick(logits_Nv, start, self.picked_M)
        if self.extra == "hits":
            highest_N, best_N = logits_Nv.max(dim=1)
            self.best_N = torch.where(highest_N > self.highest_N, best_N + start, self.best_N)
        else:
            highest_N = logits_Nv.amax(dim=1)
        self.rescale(torch.maximum(self.highest_N, highest_N))
        shifted_Nv = logits_Nv.sub_(self.highest_N[:, None])
        if self.extra != "entropy":
            exp_Nv = shifted_Nv.exp_()
        else:
            exp_Nv = shifted_Nv.exp()
            self.weighted_N = self.weighted_N + shifted_Nv.mul_(exp_Nv).sum(dim=1)
        self.total_N = self.total_N + exp_Nv.sum(dim=1)
        return exp_Nv

    def rescale(self, highest_N: Tensor) -> Tensor:
        """Change to another largest logit; return the factor that rescales the sums so far."""
        change_N = self.highest_N - highest_N
        factor_N = change_N.exp()
        self.weighted_N = factor_N * (self.weighted_N + change_N * self.total_N)
        self.total_N = factor_N * self.total_N
        self.highest_N = highest_N
        return factor_N

    def gather(self, group: dist.ProcessGroup) -> Tensor:
        """Combine the statistics of all ranks; return the factor of `rescale`."""
        local_highest_N = self.highest_N
        highest_N = local_highest_N.clone()
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        factor_N = self.rescale(highest_N)
        if self.extra == "hits":
            self.hits_N = self._hits(local_highest_N == highest_N, group)
        parts = [self.picked_M, self.total_N, self.weighted_N]
        sums = torch.cat(parts)
        dist.all_reduce(sums, group=group)
        self.picked_M, self.total_N, self.weighted_N = sums.split([len(part) for part in parts])
        return factor_N

    def _hits(self, has_largest_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return 1 where the target is the most likely token, or the lowest of equal ones."""
        rank = dist.get_rank(group)
        owner_N = torch.where(has_largest_N, rank, dist.get_world_size(group))
        dist.all_reduce(owner_N, dist.ReduceOp.MIN, group=group)
        hits_N = ((self.best_N == self.columns.column_M) & (owner_N == rank)).float()
        dist.all_reduce(hits_N, group=group)
        return hits_N


class _Predict(torch.autograd.Function):
    """Log-probs with an explicit gradient: autograd has no rule for these collectives."""

    @staticmethod
    def forward(
        ctx: Any,
        columns: VocabShard,
        valid: int,
        group: dist.ProcessGroup,
        extra: Extra | None,
        temperature: float,
        cap: float | None,
        *given: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        products, places = Products(factor_pairs(given), cap), len(given[0])
        softmax = _Softmax(columns, places, extra)
        ctx.slices = list(slices(places, valid))
        ctx.group, ctx.extra, ctx.columns, ctx.cap = group, extra, columns, cap
        exp_Nv = None
        for start, end in ctx.slices:
            logits_Nv = logits_of(products, start, end)
            if temperature != 1:
                logits_Nv /= temperature
            exp_Nv = softmax.add(logits_Nv, start)
        factor_N = softmax.gather(group)
        log_total_N = softmax.total_N.log()
        # The order matters: the sum of the two would round the highest logit's own digits away.
        highest_M, log_total_M = map(columns.per_target, (softmax.highest_N, log_total_N))
        log_probs_M = softmax.picked_M - highest_M - log_total_M
        entropy_N = log_total_N - softmax.weighted_N / softmax.total_N
        probs_Nv = None  # stored if one slice holds all of them, else recomputed
        can_store = len(ctx.slices) == 1 and cap is None
        if exp_Nv is not None and can_store and any(ctx.needs_input_grad):
            probs_Nv = exp_Nv.mul_((factor_N / softmax.total_N)[:, None])
        log_sum_N = softmax.highest_N + log_total_N
        ctx.save_for_backward(log_sum_N, entropy_N, probs_Nv, *given)
        if extra == "hits":
            ctx.mark_non_differentiable(softmax.hits_N)
            return log_probs_M, softmax.hits_N
        return log_probs_M, entropy_N if extra == "entropy" else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient. With p = softmax(logits): d log p_t = [v = t] - p_v; dH = -p_v (log
        p_v + H)."""
        log_sum_N, entropy_N, stored_Nv, *factors = ctx.saved_tensors
        log_prob_grad_M = grads[0]
        log_prob_grad_N = ctx.columns.per_place(log_prob_grad_M, len(log_sum_N))
        entropy_grad_N = grads[1] if ctx.extra == "entropy" else None

        def slope_of(probs_Nv: Tensor, start: int) -> Tensor:
            if stored_Nv is None:
                probs_Nv = probs_Nv.sub_(log_sum_N[:, None]).exp_()
            slope_Nv = _logits_gradient(probs_Nv, log_prob_grad_N, entropy_N, entropy_grad_N)
            return ctx.columns.add(slope_Nv, start, log_prob_grad_M)

        products = Products(factor_pairs(factors), ctx.cap)
        return *(None,) * 6, *factor_gradients(ctx, products, stored_Nv, slope_of)


def _logits_gradient(
    probs_Nv: Tensor, of_log_prob_N: Tensor, entropy_N: Tensor, of_entropy_N: Tensor | None
) -> Tensor:
    """Return the gradient of a slice's logits, without the extra term of the targets' own, written
    over the probabilities: a backward pass reads them once."""
    if of_entropy_N is None:
        return probs_Nv.mul_(-of_log_prob_N[:, None])
    slope_Nv = torch.xlogy(probs_Nv, probs_Nv).add_(probs_Nv * entropy_N[:, None])
    return slope_Nv.mul_(-of_entropy_N[:, None]).sub_(probs_Nv.mul_(of_log_prob_N[:, None]))
