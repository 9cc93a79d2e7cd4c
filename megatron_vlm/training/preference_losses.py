"""Losses over preferences: pure functions of the log-probs of answers, with the definitions of TRL
1.16.

Shapes: E examples of a micro-batch, R their rows, N supervised tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.config.objective_configs import PreferenceConfig
from megatron_vlm.data.batches.micro_batch import ROW_REFERENCE
from megatron_vlm.training.stage_inputs import RowInputs

log_sigmoid = F.logsigmoid


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected answer of each pair: log-probs, those of the reference model, and
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
        """Return the pairs of chosen and rejected answers in turn, from their log-probs, those of
        the reference, and their numbers of tokens."""
        (chosen, rejected), (ref_chosen, ref_rejected), tokens = (
            value_R.view(-1, 2).unbind(1) for value_R in (sums_R, reference_R, counts_R)
        )
        return Pairs(chosen, rejected, ref_chosen, ref_rejected, *tokens)

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
    def mean_margin(self) -> Tensor:
        """Margin of the means over tokens."""
        chosen, rejected = self.chosen_ratio, self.rejected_ratio
        return chosen / self.chosen_tokens_E - rejected / self.rejected_tokens_E


PairLoss = Callable[[Pairs, PreferenceConfig], Tensor]


def _sigmoid(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return -log_sigmoid(p.beta * pairs.margin)


def _sigmoid_norm(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return -log_sigmoid(p.beta * pairs.mean_margin)


def _hinge(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return torch.relu(1 - p.beta * pairs.margin)


def _ipo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return (pairs.mean_margin - 1 / (2 * p.beta)) ** 2


def _exo_pair(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits, smoothing = p.beta * pairs.margin, p.label_smoothing
    better = torch.sigmoid(logits) * (log_sigmoid(logits) - math.log1p(-smoothing))
    return better + torch.sigmoid(-logits) * (log_sigmoid(-logits) - math.log(smoothing))


def _nca_pair(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = p.beta * pairs.chosen_ratio, p.beta * pairs.rejected_ratio
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _robust(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits, smoothing = p.beta * pairs.margin, p.label_smoothing
    clean, flipped = log_sigmoid(logits), log_sigmoid(-logits)
    return (smoothing * flipped - (1 - smoothing) * clean) / (1 - 2 * smoothing)


def _bco_pair(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return -log_sigmoid(p.beta * pairs.chosen_ratio) - log_sigmoid(-p.beta * pairs.rejected_ratio)


def _sppo_hard(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    half = 0.5 / p.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def _apo_zero(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return (
        1
        - torch.sigmoid(p.beta * pairs.chosen_ratio)
        + torch.sigmoid(p.beta * pairs.rejected_ratio)
    )


def _apo_down(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return torch.sigmoid(p.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(p.beta * pairs.margin)


def _discopop(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    logits = p.beta * pairs.margin
    share = torch.sigmoid(logits / p.discopop_tau)
    return -log_sigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _orpo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = _means(pairs)
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -p.beta * log_sigmoid(odds)


def _simpo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    chosen, rejected = _means(pairs)
    return _smoothed(p.beta * (chosen - rejected) - p.simpo_gamma, p.label_smoothing)


def _cpo(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    return _smoothed(p.beta * (pairs.chosen_E - pairs.rejected_E), p.label_smoothing)


def _means(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return the mean log-prob of a token of each answer."""
    return pairs.chosen_E / pairs.chosen_tokens_E, pairs.rejected_E / pairs.rejected_tokens_E


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Return the loss of labels of which a share is wrong."""
    return -(1 - smoothing) * log_sigmoid(logits) - smoothing * log_sigmoid(-logits)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, without loss of precision at either end."""
    is_near_zero = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near_zero, x, -1.0)))
    return torch.where(
        is_near_zero, near, torch.log1p(-torch.exp(torch.where(is_near_zero, -1.0, x)))
    )


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "orpo": _orpo,
    "simpo": _simpo,
    "cpo": _cpo,
}


def aot(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    """Return the loss of alignment via optimal transport over all pairs of a global batch: margins
    and those of the reference are compared in the order of their size."""
    margins, _ = torch.sort(pairs.chosen_E - pairs.rejected_E)
    of_reference, _ = torch.sort(pairs.ref_chosen_E - pairs.ref_rejected_E)
    return _smoothed(p.beta * (margins - of_reference), p.label_smoothing)


def aot_unpaired(pairs: Pairs, p: PreferenceConfig) -> Tensor:
    """Return the loss of `aot` over chosen and rejected answers that belong to no pairs."""
    chosen, _ = torch.sort(pairs.chosen_ratio)
    rejected, _ = torch.sort(pairs.rejected_ratio)
    return _smoothed(p.beta * (chosen - rejected), p.label_smoothing)


GLOBAL_LOSSES: Mapping[str, PairLoss] = {"aot": aot, "aot_unpaired": aot_unpaired}


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers with labels: their log-probs over those of the reference model."""

    ratio_R: Tensor
    is_rejected_R: Tensor


def kto(answers: LabelledAnswers, p: PreferenceConfig, kl: float) -> Tensor:
    """Return the loss of KTO. `kl` is the mean log-ratio of mismatched answers, at least 0."""
    sign_R = 1 - 2 * answers.is_rejected_R.double()
    loss_R = 1 - torch.sigmoid(p.beta * sign_R * (answers.ratio_R - kl))
    return label_weights(answers, p) * loss_R


def apo_zero_unpaired(answers: LabelledAnswers, p: PreferenceConfig, kl: float) -> Tensor:
    """Return the loss of APO-zero for answers with labels."""
    sign_R = 1 - 2 * answers.is_rejected_R.double()
    loss_R = torch.sigmoid(-p.beta * sign_R * answers.ratio_R)
    return label_weights(answers, p) * loss_R


def label_weights(answers: LabelledAnswers, p: PreferenceConfig) -> Tensor:
    """Return the weight of each answer's label."""
    weights = torch.full_like(answers.ratio_R, p.desirable_weight)
    return torch.where(answers.is_rejected_R, p.undesirable_weight, weights)


LABEL_LOSSES: Mapping[str, Callable[[LabelledAnswers, PreferenceConfig, float], Tensor]] = {
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
}
