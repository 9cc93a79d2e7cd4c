"""Losses over preferences: pure functions of the log-probs of answers, with the definitions of TRL
1.16.

Shapes: E examples of a micro-batch, R their rows, N supervised tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_vlm.config.objective_configs import PreferenceConfig
from megatron_vlm.data.batches.micro_batch import ROW_REFERENCE
from megatron_vlm.training.stage_inputs import RowInputs


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
    """Return the loss of labels of which a share is wrong."""
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
