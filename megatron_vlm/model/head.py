"""Heads: what the last stage computes at the supervised places, for a loss or for scores.

Shapes: N places, M targets (equal to N, unless places have several targets), J tokens of a place, R
these and all others together, H width of the decoder, V this rank's part of the padded vocabulary,
v a slice of V.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vlm.model.log_probs import Extra, Products, logits_of, part_of, predict, slices
from megatron_vlm.model.lumped_log_probs import predict_lumped
from megatron_vlm.model.vision import mark_ready_with_zero_grads


@dataclass(frozen=True)
class HeadOutput:
    """Output of a head: the fields that it computes."""

    log_probs_M: Tensor | None = None  # log-probs of the targets
    entropy_N: Tensor | None = None  # entropy of the distribution at each place, in nats
    hits_N: Tensor | None = None  # 1 where the target is the most likely token
    events_NR: Tensor | None = None  # log-probs of some tokens, and of all others together
    top_ids_NJ: Tensor | None = None  # the most likely tokens, in falling order
    top_log_probs_NJ: Tensor | None = None  # log-probs of these, in float64
    embeddings_NH: Tensor | None = None  # normalised hidden states
    scores_N: Tensor | None = None  # rewards, by the scalar head
    mtp: Any = None  # MtpEvents of model/mtp_head.py, where an MTP head is trained

    @property
    def device(self) -> torch.device:
        """Device of the output, which Megatron's schedules ask for."""
        return next(field.device for field in vars(self).values() if isinstance(field, Tensor))


@dataclass(frozen=True)
class Targets:
    """Tokens at the supervised places."""

    ids_M: Tensor
    of_M: Tensor | None = None  # place of each target, if places have several
    teacher_ids_NJ: Tensor | None = None  # a teacher's most likely tokens


@dataclass(frozen=True)
class OutputLayer:
    """The model's last layer, with its adapter if it has one."""

    layer: Any
    weight_VH: Tensor
    vocab: int
    tp_group: dist.ProcessGroup
    cap: float | None = None  # logits are cap * tanh(logits / cap)
    score_1H: Tensor | None = None  # weight of the scalar head of a reward model
    is_frozen: bool = False  # only its inputs get gradients

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's part of the logits of hidden states [S, B, H]."""
        logits: Tensor = self.layer(hidden, weight=self.weight_VH)[0]
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()

    def products(self, hidden_NH: Tensor) -> Products:
        """Return the products that make the logits."""
        products = [(hidden_NH, self.weight_VH)]
        if (adapters := getattr(self.layer, "lora", None)) is not None:
            products.append(adapters.factors(hidden_NH, self.is_frozen))
        if self.is_frozen:
            products = [(input_NI, weight_VI.detach()) for input_NI, weight_VI in products]
        return Products(products, self.cap)

    def predict(
        self,
        hidden_NH: Tensor,
        targets: Targets,
        extra: Extra | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of the targets, and the extra."""
        products, where = self.products(hidden_NH), (self.vocab, self.tp_group)
        return predict(products, targets.ids_M, *where, extra, targets.of_M, temperature)

    def predict_events(
        self, hidden_NH: Tensor, labels_N: Tensor, ids_NJ: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the labels and, at a temperature, of these tokens and of all
        others together."""
        where = labels_N, ids_NJ, self.vocab, self.tp_group, temperature
        return predict_lumped(self.products(hidden_NH), *where)


Head = Callable[[Tensor, OutputLayer, Targets], HeadOutput]


def log_probs_head(
    hidden_NH: Tensor, layer: OutputLayer, targets: Targets, temperature: float = 1.0
) -> HeadOutput:
    """Return the log-probs of the targets. A temperature other than 1 allows no backward pass."""
    return HeadOutput(layer.predict(hidden_NH, targets, temperature=temperature)[0])


def entropy_head(hidden_NH: Tensor, layer: OutputLayer, targets: Targets) -> HeadOutput:
    """Return the log-probs of the targets, one at each place, with the entropy there."""
    log_probs_M, entropy_N = layer.predict(hidden_NH, targets, "entropy")
    return HeadOutput(log_probs_M, entropy_N=entropy_N)


def hits_head(hidden_NH: Tensor, layer: OutputLayer, targets: Targets) -> HeadOutput:
    """Return the log-probs of the targets, one at each place, and whether they are the most likely
    tokens."""
    log_probs_M, hits_N = layer.predict(hidden_NH, targets, "hits")
    return HeadOutput(log_probs_M, hits_N=hits_N)


def lumped_head(
    hidden_NH: Tensor, layer: OutputLayer, targets: Targets, temperature: float = 1.0
) -> HeadOutput:
    """Return the log-probs of the targets, one at each place, and at a temperature the log-probs
    of a teacher's tokens and of all others together."""
    ids_NJ = targets.teacher_ids_NJ
    if ids_NJ is None:  # without supervised places, as in a filler
        ids_NJ = targets.ids_M.new_zeros(0, 1)
    log_probs_N, events_NR = layer.predict_events(hidden_NH, targets.ids_M, ids_NJ, temperature)
    return HeadOutput(log_probs_N, events_NR=events_NR)


@torch.no_grad()
def top_tokens_head(
    hidden_NH: Tensor, layer: OutputLayer, targets: Targets, *, count: int, temperature: float
) -> HeadOutput:
    """Return the most likely tokens of each place, with their log-probs at a temperature, from the
    same logits as `log_probs_head`. The same on all TP ranks."""
    products, places = layer.products(hidden_NH), len(hidden_NH)
    first, valid = part_of(products, layer.vocab, layer.tp_group)
    logits_NJ = hidden_NH.new_full((places, count), -torch.inf, dtype=torch.float)
    ids_NJ = torch.zeros(places, count, dtype=torch.long, device=hidden_NH.device)
    total_N = hidden_NH.new_full((places,), -torch.inf, dtype=torch.float)  # log of the sum
    for start, end in slices(places, valid):
        logits_Nv = logits_of(products, start, end) / temperature
        total_N = torch.logaddexp(total_N, logits_Nv.logsumexp(dim=1))
        ids_v = torch.arange(first + start, first + end, device=ids_NJ.device)
        slice_top = logits_Nv.topk(min(count, end - start), dim=1)
        logits_NJ, ids_NJ = _top_logits(
            torch.cat([logits_NJ, slice_top.values], dim=1),
            torch.cat([ids_NJ, ids_v[slice_top.indices]], dim=1),
            count,
        )
    logits, ids, totals = (
        _of_all_ranks(local, layer.tp_group)
        for local in (logits_NJ.double(), ids_NJ, total_N.double()[:, None])
    )
    best_NJ, best_ids_NJ = _top_logits(logits, ids, count)
    log_probs_NJ = best_NJ - totals.logsumexp(dim=1, keepdim=True)
    return HeadOutput(top_ids_NJ=best_ids_NJ, top_log_probs_NJ=log_probs_NJ)


def _top_logits(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(count, dim=1)
    return best.values, ids.gather(1, best.indices)


def _of_all_ranks(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the columns of all ranks next to each other."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=1)


def top_events_head(
    hidden_NH: Tensor, layer: OutputLayer, targets: Targets, *, count: int, temperature: float
) -> HeadOutput:
    """Return a student's targets: the log-probs of the labels, and the most likely tokens of each
    place, with their log-probs and that of all others together at a temperature."""
    top = top_tokens_head(hidden_NH, layer, targets, count=count, temperature=temperature)
    own = replace(targets, teacher_ids_NJ=top.top_ids_NJ)
    return replace(lumped_head(hidden_NH, layer, own, temperature), top_ids_NJ=top.top_ids_NJ)


def embedding_head(hidden_NH: Tensor, layer: OutputLayer, targets: Targets) -> HeadOutput:
    """Return the normalised hidden states. The output layer has no part in them."""
    hidden_NH = mark_ready_with_zero_grads(hidden_NH, layer.layer)
    return HeadOutput(embeddings_NH=nn.functional.normalize(hidden_NH.float(), dim=1))


def score_head(hidden_NH: Tensor, layer: OutputLayer, targets: Targets) -> HeadOutput:
    """Return the rewards. The output layer has no part in them."""
    assert layer.score_1H is not None, "the checkpoint was opened without a scalar head"
    hidden_NH = mark_ready_with_zero_grads(hidden_NH, layer.layer)
    return HeadOutput(scores_N=(hidden_NH.float() @ layer.score_1H.float().T)[:, 0])
