"""Dependence of sampled answers on their pictures, for `rl.seen`: a figure of a step, or weights of
the loss.

The drawn tokens are scored with the pictures and with hidden ones. The gap of a token is the first
log-prob minus the second. Means and extremes are taken over all answers of an update, so that no
weight depends on the layout.

Shapes: N drawn tokens of a row, P patches, C values of a patch.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.collate import black_patches, grey, hide_pictures, pixelated
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.rl.policy_update import PolicyUpdater, Values
from megatron_vlm.rl.train_batch import (
    TrainBatch,
    TrainRow,
    Update,
    View,
    of_teacher,
    replayed,
    same,
)
from megatron_vlm.training.token_losses import kl_k3

BLIND = 1e-3  # an answer with a smaller mean does not depend on its pictures
LARGEST_GAP, LARGEST_KL = 20.0, 10.0  # as in VPPO; some tokens would outweigh all others
LOWEST_FACTOR = 0.9  # VPPO's factor of the answer that depends least on its pictures
HIGH_SHARE = 0.5  # VA-OPD's weight of an answer that is that of its high tokens
SPREAD_FLOOR = 1e-6  # added by VA-OPD to a standard deviation
# What rl.seen_picture=null stands for.
_PICTURES = {"report": "grey", "vppo": "patches", "va_opd": "pixelated"}


@dataclass
class AnswerSums:
    """Sums over the drawn tokens of an episode, in its rows with pictures."""

    tokens: int = 0
    kl: float = 0.0
    gain: float = 0.0  # sum of the gaps above 0


@dataclass(frozen=True)
class SeenScores:
    """Gaps [N] of this replica's rows with pictures, by row number, and the sums of all episodes
    of the train batch that have such rows, by their numbers."""

    gaps: Mapping[int, Tensor] = field(default_factory=dict)
    answers: Mapping[int, AnswerSums] = field(default_factory=dict)

    @property
    def seen(self) -> float | None:
        """Mean KL of a token to the policy without the pictures."""
        tokens = sum(each.tokens for each in self.answers.values())
        return sum(each.kl for each in self.answers.values()) / tokens if tokens else None

    @property
    def blind(self) -> float | None:
        """Share of the answers that do not depend on their pictures."""
        means = [each.kl / each.tokens for each in self.answers.values()]
        return fmean(mean < BLIND for mean in means) if means else None


def picture_kl(gap_N: Tensor) -> Tensor:
    """Return an estimate of KL(with the pictures || without) for each token, never negative."""
    gap_N = gap_N.double().clamp(-LARGEST_GAP, LARGEST_GAP)
    return kl_k3(gap_N, torch.zeros_like(gap_N)).clamp(max=LARGEST_KL)


def hidden_view(cfg: Config, step: int, of: View = same) -> View:
    """Return a view with hidden pictures. Rows that share pictures share the hidden ones, too."""
    made: dict[int, Tensor] = {}  # by the id of the real patches

    def hide(pixels_PC: Tensor) -> Tensor:
        if id(pixels_PC) not in made:
            made[id(pixels_PC)] = _hidden(pixels_PC, cfg, step)
        return made[id(pixels_PC)]

    return lambda each: hide_pictures(of(each), hide)


def _hidden(pixels_PC: Tensor, cfg: Config, step: int) -> Tensor:
    kind = cfg.rl.seen_picture or _PICTURES[cfg.rl.seen]
    if kind != "patches":
        return grey(pixels_PC) if kind == "grey" else pixelated(pixels_PC)
    # The picture itself is a part of the seed, so that no layout changes its black patches.
    digest = hashlib.blake2b(f"{cfg.train.seed} {step} ".encode(), digest_size=7)
    digest.update(pixels_PC.numpy().tobytes())
    return black_patches(pixels_PC, int.from_bytes(digest.digest(), "little"))


def measure_seen(
    updater: PolicyUpdater,
    train_batch: TrainBatch,
    rows: Mapping[int, TrainRow],
    values: Values,
    step: int,
    is_shown: bool,
) -> SeenScores | None:
    """Score the rows of this replica without their pictures, if this step needs that: with
    rl.seen=report only a step whose samples are shown does. A collective."""
    name = updater.cfg.rl.seen
    if name == "off" or (name == "report" and not is_shown):
        return None
    of = of_teacher if name == "va_opd" else replayed
    if not any(of(each).has_media for each in train_batch.rows):
        return SeenScores()
    pictured = {number: each for number, each in rows.items() if of(each).has_media}
    view = hidden_view(updater.cfg, step, of)
    if name == "va_opd":
        pictured = {n: each for n, each in pictured.items() if n in values.teacher}
        scores = updater.teacher_scores(train_batch, pictured, view)
        hidden = {number: each.label_log_probs_N for number, each in scores.items()}
        shown = {number: values.teacher[number].label_log_probs_N for number in pictured}
    else:
        hidden = updater.drawn_log_probs(updater.worker, train_batch, pictured, view)
        shown = {n: values.old.get(n, each.sampler_log_probs_N) for n, each in pictured.items()}
    gaps = {number: shown[number] - hidden[number] for number in pictured}
    return SeenScores(gaps, _gather_sums(updater, train_batch, gaps))


def _gather_sums(
    updater: PolicyUpdater, train_batch: TrainBatch, gaps: Mapping[int, Tensor]
) -> dict[int, AnswerSums]:
    """Return the sums of all episodes. They are added in the order of the rows: the same digits at
    each layout. A collective."""
    local = {
        str(number): (float(picture_kl(gap_N).sum()), float(gap_N.double().clamp(min=0).sum()))
        for number, gap_N in gaps.items()
        if updater.worker.grid.leads
    }
    gathered = all_gather_json(local)
    sums = {int(number): each for part in gathered for number, each in part.items()}
    answers: dict[int, AnswerSums] = {}
    for number, (kl, gain) in sorted(sums.items()):
        row = train_batch.rows[number]
        answer = answers.setdefault(row.episode, AnswerSums())
        answer.tokens += len(row.sampler_log_probs_N)
        answer.kl += kl
        answer.gain += gain
    return answers


def weigh(
    cfg: Config,
    train_batch: TrainBatch,
    rows: Mapping[int, TrainRow],
    values: Values,
    scores: SeenScores | None,
) -> Values:
    """Return the values of this replica's rows with the weights of rl.seen."""
    share = cfg.rl.seen_tokens
    if scores is None or cfg.rl.seen in ("off", "report"):
        return values
    if cfg.rl.seen == "va_opd":
        return replace(values, loss_weights=va_opd_weights(train_batch, rows, scores, share))
    weights = dict(values.weights)
    for update in train_batch.updates:
        for number, weight_N in vppo_weights(train_batch, update, scores, share).items():
            weights[number] = weights.get(number, 1.0) * weight_N
    return replace(values, weights=weights)


def vppo_weights(
    train_batch: TrainBatch,
    update: Update,
    scores: SeenScores,
    share: float,
    lowest: float = LOWEST_FACTOR,
) -> dict[int, Tensor]:
    """Return the factors of the advantages [N] of this replica's rows with pictures, as VPPO has
    them (arXiv 2510.09285): those tokens of a row that depend most on the pictures keep their
    advantages, and answers that depend more on them than others of the update weigh more."""
    numbers = [number for part in update.plan for batch in part for number in batch]
    names = sorted({train_batch.rows[number].episode for number in numbers} & set(scores.answers))
    means = [scores.answers[name].kl / scores.answers[name].tokens for name in names]
    factors = dict(zip(names, answer_factors(means, lowest), strict=True))
    return {
        number: factors[train_batch.rows[number].episode]
        * largest(picture_kl(scores.gaps[number]), share).float()
        for number in numbers
        if number in scores.gaps
    }


def answer_factors(means: Sequence[float], lowest: float = LOWEST_FACTOR) -> list[float]:
    """Return a factor of each answer, from `lowest` to what makes their mean 1. Where answers do
    not differ, their order would be that of rounding errors, so each factor is 1."""
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high - low < BLIND:
        return [1.0] * len(means)
    shares = [(mean - low) / (high - low) for mean in means]
    highest = lowest + (1 - lowest) / fmean(shares)
    return [lowest + share * (highest - lowest) for share in shares]


def largest(scores_N: Tensor, share: float) -> Tensor:
    """Return True for this share of the tokens, rounded up: those with the largest scores, and of
    equal ones the first."""
    count = math.ceil(round(share * len(scores_N), 6))
    is_large_N = torch.zeros(len(scores_N), dtype=torch.bool)
    is_large_N[scores_N.argsort(descending=True, stable=True)[:count]] = True
    return is_large_N


def va_opd_weights(
    train_batch: TrainBatch, rows: Mapping[int, TrainRow], scores: SeenScores, share: float
) -> dict[int, Tensor]:
    """Return the weights of the losses [N] of this replica's rows, as VA-OPD has them (arXiv
    2605.21924). The weights of a prompt's answers are a softmax of how far the pictures help the
    teacher, and their sum is 1. Half of a weight is shared by the tokens that they help most, and
    the other half by the others. An answer's rows divide its weight by their tokens."""
    tokens: dict[int, int] = defaultdict(int)
    groups: dict[int, list[int]] = defaultdict(list)
    for each in train_batch.rows:
        if each.episode not in tokens:
            groups[each.group].append(each.episode)
        tokens[each.episode] += len(each.sampler_log_probs_N)
    answers: dict[int, float] = {}
    for names in groups.values():
        sums = [scores.answers.get(name) for name in names]
        gains = torch.tensor(
            [
                0.0 if each is None else each.gain / tokens[name]
                for name, each in zip(names, sums, strict=True)
            ],
            dtype=torch.double,
        )
        scale = gains.std(correction=0) + SPREAD_FLOOR
        weights = ((gains - gains.mean()) / scale).softmax(0)
        answers |= zip(names, weights.tolist(), strict=True)
    found = {}
    for number, each in rows.items():
        count = len(each.sampler_log_probs_N)
        weight = answers[each.episode] * count / tokens[each.episode]
        found[number] = weight * token_shares(scores.gaps.get(number, torch.zeros(count)), share)
    return found


def token_shares(gap_N: Tensor, share: float) -> Tensor:
    """Return the share of each token in the weight of its row. Where no picture helps any token,
    all shares are equal."""
    gain_N, count = gap_N.clamp(min=0), len(gap_N)
    is_high_N = largest(gain_N, share)
    high = int(is_high_N.sum())
    if high == count or not gain_N.any():
        return torch.full((count,), 1 / count)
    return torch.where(is_high_N, HIGH_SHARE / high, (1 - HIGH_SHARE) / (count - high))
