"""Losses that compare rows. Preferences have pure functions of the log-probs of answers, with the
definitions of TRL 1.16. Embeddings have losses of a global batch, with the definitions of
sentence-transformers 6.2, and rerankers losses of the logits of documents.

Shapes: E examples of a micro-batch, R their rows (of embeddings: queries and documents), N
supervised tokens, A queries, D documents, H width."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_vlm.config.objective_configs import EmbedConfig, PreferenceConfig
from megatron_vlm.data.batches.micro_batch import ROW_REFERENCE
from megatron_vlm.training.stage_inputs import RowInputs


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected answer of each pair: log-probs, the reference model's, and
    numbers of tokens. Without a reference, its log-probs are zero."""

    chosen_E: Tensor
    rejected_E: Tensor
    ref_chosen_E: Tensor
    ref_rejected_E: Tensor
    chosen_tokens_E: Tensor
    rejected_tokens_E: Tensor

    @staticmethod
    def from_rows(log_probs_N: Tensor, rows: RowInputs) -> "Pairs":
        """Return the pairs of a micro-batch, whose rows are chosen and rejected answers in turn."""
        sums_R = rows.sums(log_probs_N)
        reference_R = rows.values.get(ROW_REFERENCE)
        if reference_R is None:
            reference_R = torch.zeros_like(sums_R)
        return Pairs.from_sums(sums_R, reference_R, rows.counts_R)

    @staticmethod
    def from_sums(sums_R: Tensor, reference_R: Tensor, counts_R: Tensor) -> "Pairs":
        """Return the pairs of chosen and rejected answers in turn, from their log-probs, the
        reference's, and their numbers of tokens."""
        fields = (each_R.view(-1, 2).unbind(1) for each_R in (sums_R, reference_R, counts_R))
        return Pairs(*chain.from_iterable(fields))

    @property
    def chosen_ratio(self) -> Tensor:
        """Log-prob of the chosen answer over that of the reference."""
        return self.chosen_E - self.ref_chosen_E

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected_E - self.ref_rejected_E

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Mean log-prob of a token of each answer."""
        return self.chosen_E / self.chosen_tokens_E, self.rejected_E / self.rejected_tokens_E

    @property
    def mean_margin(self) -> Tensor:
        """Margin of the means over tokens."""
        chosen, rejected = self.chosen_ratio, self.rejected_ratio
        return chosen / self.chosen_tokens_E - rejected / self.rejected_tokens_E


PairLoss = Callable[[Pairs, PreferenceConfig], Tensor]


def _exo_pair(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits, smoothing = p.beta * pairs.margin, p.label_smoothing
    better = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-smoothing))
    return better + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(smoothing))


def _nca_pair(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = p.beta * pairs.chosen_ratio, p.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits, smoothing = p.beta * pairs.margin, p.label_smoothing
    clean, flipped = logsigmoid(logits), logsigmoid(-logits)
    return (smoothing * flipped - (1 - smoothing) * clean) / (1 - 2 * smoothing)


def _sppo_hard(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    half = 0.5 / p.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def _discopop(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits = p.beta * pairs.margin
    share = torch.sigmoid(logits / p.discopop_tau)
    return -logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _orpo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = pairs.means
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -p.beta * logsigmoid(odds)


def _simpo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = pairs.means
    return _smoothed(p.beta * (chosen - rejected) - p.simpo_gamma, p.label_smoothing)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Return the loss if this share of the labels is wrong."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, without loss of precision at either end."""
    is_near_zero = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near_zero, -1.0, x)))
    return torch.where(is_near_zero, near, far)


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": lambda pairs, p: -logsigmoid(p.beta * pairs.margin),
    "sigmoid_norm": lambda pairs, p: -logsigmoid(p.beta * pairs.mean_margin),
    "hinge": lambda pairs, p: torch.relu(1 - p.beta * pairs.margin),
    "ipo": lambda pairs, p: (pairs.mean_margin - 1 / (2 * p.beta)) ** 2,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": lambda pairs, p: (
        -logsigmoid(p.beta * pairs.chosen_ratio) - logsigmoid(-p.beta * pairs.rejected_ratio)
    ),
    "sppo_hard": _sppo_hard,
    "apo_zero": lambda pairs, p: (
        1
        - torch.sigmoid(p.beta * pairs.chosen_ratio)
        + torch.sigmoid(p.beta * pairs.rejected_ratio)
    ),
    "apo_down": lambda pairs, p: (
        torch.sigmoid(p.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(p.beta * pairs.margin)
    ),
    "discopop": _discopop,
    "orpo": _orpo,
    "simpo": _simpo,
    "cpo": lambda pairs, p: _smoothed(
        p.beta * (pairs.chosen_E - pairs.rejected_E), p.label_smoothing
    ),
}


def aot(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    """Return the loss of alignment via optimal transport over all pairs of a global batch: margins
    and the reference's margins are compared in the order of their size."""
    margins, _ = torch.sort(pairs.chosen_E - pairs.rejected_E)
    of_reference, _ = torch.sort(pairs.ref_chosen_E - pairs.ref_rejected_E)
    return _smoothed(p.beta * (margins - of_reference), p.label_smoothing)


def aot_unpaired(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    """Return the loss of `aot` over chosen and rejected answers that belong to no pairs."""
    chosen, _ = torch.sort(pairs.chosen_ratio)
    rejected, _ = torch.sort(pairs.rejected_ratio)
    return _smoothed(p.beta * (chosen - rejected), p.label_smoothing)


GLOBAL_LOSSES: Mapping[str, PairLoss] = {"aot": aot, "aot_unpaired": aot_unpaired}


def kto(ratio_R: Tensor, is_rejected_R: Tensor, p: PreferenceConfig, kl: float) -> Tensor:
    """Return the loss of KTO from log-ratios to the reference. `kl` is the mean log-ratio of
    mismatched answers, at least 0."""
    sign_R = 1 - 2 * is_rejected_R.double()
    return _label_weights(ratio_R, is_rejected_R, p) * (
        1 - torch.sigmoid(p.beta * sign_R * (ratio_R - kl))
    )


def _apo_zero_unpaired(
    ratio_R: Tensor, is_rejected_R: Tensor, p: PreferenceConfig, kl: float
) -> Tensor:
    sign_R = 1 - 2 * is_rejected_R.double()
    return _label_weights(ratio_R, is_rejected_R, p) * torch.sigmoid(-p.beta * sign_R * ratio_R)


def _label_weights(ratio_R: Tensor, is_rejected_R: Tensor, p: PreferenceConfig) -> Tensor:
    weights_R = torch.full_like(ratio_R, p.desirable_weight)
    return torch.where(is_rejected_R, p.undesirable_weight, weights_R)


LABEL_LOSSES: Mapping[str, Callable[[Tensor, Tensor, PreferenceConfig, float], Tensor]] = {
    "kto": kto,
    "apo_zero_unpaired": _apo_zero_unpaired,
}


def bradley_terry(
    center_coef: float, scores_N: Tensor, rows: RowInputs, margin_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of TRL's RewardTrainer for each pair, and its figures."""
    is_chosen_R, rewards_R = ~rows.is_rejected_R, scores_N.double()
    chosen_E, rejected_E = rewards_R[is_chosen_R], rewards_R[~is_chosen_R]
    difference_E = chosen_E - rejected_E
    centering_E = center_coef * (chosen_E + rejected_E) ** 2
    figures = {
        "rewards_chosen": chosen_E,
        "rewards_rejected": rejected_E,
        "rewards_margin": difference_E,
        "reward_accuracy": (difference_E > 0).double(),
    }
    return centering_E - logsigmoid(difference_E - margin_N[is_chosen_R]), figures


FIGURES = ("accuracy", "positive_similarity", "nearest_negative_similarity")
_QUERIES_AT_ONCE = 1024  # bounds the memory of their similarities to all documents


@dataclass(frozen=True)
class RetrievalRows:
    """Rows of a global batch. A record's rows are a query, its positive, and its negatives."""

    query_A: Tensor  # row of each query
    document_D: Tensor  # row of each document
    positive_A: Tensor  # place of each query's positive among the documents

    @staticmethod
    def from_examples(example_R: Tensor) -> "RetrievalRows":
        """Return the rows of examples, from the number of each row's example in ascending order."""
        is_query_R = torch.ones_like(example_R, dtype=torch.bool)
        is_query_R[1:] = example_R[1:] != example_R[:-1]
        query_A = is_query_R.nonzero()[:, 0]
        earlier_A = torch.arange(len(query_A), device=query_A.device)  # queries before each
        return RetrievalRows(query_A, (~is_query_R).nonzero()[:, 0], query_A - earlier_A)


def info_nce(embeddings_RH: Tensor, rows: RetrievalRows, cfg: EmbedConfig) -> tuple[Tensor, Tensor]:
    """Compute the loss of MultipleNegativesRankingLoss in float64: the cross-entropy of each
    query's positive among all documents of the batch, or with embed.dimensions that of
    MatryoshkaLoss, the weighted sum over sizes that embeddings are cut to. A document that is equal
    to a query's positive counts as a negative, as it does there. Return the derivative by each
    embedding, and the number of queries with the sums of their losses and figures."""
    leaf_RH = embeddings_RH.detach().double().requires_grad_()
    sizes = cfg.dimensions or (leaf_RH.shape[1],)
    weights = cfg.dimension_weights or (1.0,) * len(sizes)
    grads_RH, sums = torch.zeros_like(leaf_RH), leaf_RH.new_zeros(2 + len(FIGURES))
    sums[0] = len(rows.query_A)
    for size, weight in zip(sizes, weights, strict=True):
        for start in range(0, len(rows.query_A), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            cut_RH = F.normalize(leaf_RH[:, :size], dim=1)
            cosine_AD = cut_RH[rows.query_A[part]] @ cut_RH[rows.document_D].T
            positive_A = rows.positive_A[part]
            loss_A = F.cross_entropy(cosine_AD / cfg.temperature, positive_A, reduction="none")
            loss = weight * loss_A.sum()
            grads_RH += torch.autograd.grad(loss, [leaf_RH])[0]
            sums[1] += loss.detach()
            if size == max(sizes):
                sums[2:] += _figures(cosine_AD.detach(), positive_A)
    return grads_RH, sums


def _figures(cosine_AD: Tensor, positive_A: Tensor) -> Tensor:
    """Return the sums of FIGURES: how often the positive is the nearest document, its similarity,
    and that of the nearest other document."""
    own_A = cosine_AD.gather(1, positive_A[:, None])[:, 0]
    nearest_A = cosine_AD.scatter(1, positive_A[:, None], -1.0).max(dim=1).values
    return torch.stack([(own_A > nearest_A).double().sum(), own_A.sum(), nearest_A.sum()])


def pointwise(logits_R: Tensor, is_negative_R: Tensor) -> Tensor:
    """Return the binary cross-entropy of each document's label."""
    sign_R = 1 - 2 * is_negative_R.to(logits_R.dtype)
    return -F.logsigmoid(sign_R * logits_R)


def listwise(logits_R: Tensor, is_negative_R: Tensor, example_R: Tensor) -> Tensor:
    """Return the cross-entropy of each positive among itself and the negatives of its query, at the
    row of the positive; the loss of negatives is 0."""
    rivals_RR = (example_R[:, None] == example_R) & is_negative_R
    rivals_RR |= torch.eye(len(logits_R), dtype=torch.bool, device=logits_R.device)
    all_RR = torch.where(rivals_RR, logits_R, -torch.inf)
    loss_R = all_RR.logsumexp(dim=1) - logits_R
    return torch.where(is_negative_R, 0.0, loss_R)
