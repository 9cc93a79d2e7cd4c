"""Gradients and scores of the objectives whose loss is of rows, for a global batch: preferences,
embeddings and rerankers.

Most losses compare the answers of one example. The loss of an embedding depends on all documents of
the global batch, and some losses sort all of its answers: they take the two passes of GlobalRows.
Between these, rows carry the derivatives of the loss: `embedding_grads` by the embedding of each
row, and `log_prob_grads` by the log-prob of each answer, to which the other losses are added.
KTO estimates a divergence in a pass of its own.

Shapes: E examples, R rows of a micro-batch, N supervised tokens, T rows of the global batch, H
width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.config.objective_configs import PreferenceConfig, RerankConfig
from megatron_vlm.config.objectives import OBJECTIVES, losses_of, needs_mismatched, spec_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.collate import filler_batch
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.data.batches.micro_batch import REJECTED, ROW_REFERENCE, MicroBatch
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.model.head import embedding_head
from megatron_vlm.training import row_losses
from megatron_vlm.training.global_rows import GlobalRows
from megatron_vlm.training.losses import LossFunction
from megatron_vlm.training.reference import ReferenceModel, row_log_probs
from megatron_vlm.training.row_scores import score_targets, values_by_place
from megatron_vlm.training.stage_inputs import RowInputs
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

Figures = dict[str, float]


class PreferenceObjective:
    """The configured objective over preferences, on one rank. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg
        self.reference = ReferenceModel(worker, cfg)

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the examples of a global batch."""
        batches, chosen_tokens, kl = self._prepare(batch.micro_batches, batch.mismatched)
        loss = loss_function(self.cfg, chosen_tokens, kl)
        metrics = self.worker.forward_backward(batches, loss=loss)
        means = finished_figures(metrics.means, self.cfg)
        if needs_mismatched(self.cfg):
            means = means | {"kl_estimate": kl}
        return replace(metrics, means=means)

    def scores(
        self, micro_batches: Sequence[MicroBatch], mismatched: Sequence[MicroBatch]
    ) -> Figures:
        """Return the sums over the examples of a global batch of the loss and of each figure, and
        the number of examples."""
        batches, *facts = self._prepare(micro_batches, mismatched)
        loss, device = loss_function(self.cfg, *facts), torch.device("cpu")
        sums: Figures = {"examples": 0.0, "loss": 0.0}
        scored = score_targets(self.worker.stage, batches)
        for batch, log_probs_N in zip(batches, scored, strict=True):
            if batch.row_values is None:
                continue
            rows = RowInputs.from_batch(batch, lambda each: each.to(device))
            loss_E, report = loss(log_probs_N, rows)
            values = {"examples": torch.ones(batch.num_examples), "loss": loss_E, **report}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value.sum())
        parts = self._gather(sums)
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def _prepare(
        self, micro_batches: Sequence[MicroBatch], mismatched: Sequence[MicroBatch]
    ) -> tuple[list[MicroBatch], float, float]:
        """Return the batches with what the loss reads of each row, and what it needs of the global
        batch: the mean of the chosen tokens of an example, for a term that is a mean over tokens,
        and the divergence that kto estimates."""
        batches = self.reference.added_to(micro_batches)
        has_token_mean = spec_of(self.cfg).records == "pair" and _sft_coef(self.cfg) > 0
        chosen_tokens = self._mean_chosen_tokens(batches) if has_token_mean else 0.0
        kl = self._divergence(mismatched) if needs_mismatched(self.cfg) else 0.0
        if _global_losses(self.cfg):
            batches = self._with_log_prob_grads(batches)
        return batches, chosen_tokens, kl

    def _mean_chosen_tokens(self, batches: Sequence[MicroBatch]) -> float:
        local = [0, 0]
        for batch in batches:
            if batch.row_values is None:
                continue
            is_chosen_R = ~batch.row_values[REJECTED]
            local[0] += int(is_chosen_R[batch.row_M].sum())
            local[1] += batch.num_examples
        tokens, examples = self.worker.grid.sum_of_replicas(*local)
        return tokens / max(examples, 1)

    def _divergence(self, mismatched: Sequence[MicroBatch]) -> float:
        """Return KTO's KL estimate: the mean log-ratio of answers to other prompts, at least 0."""
        batches = self.reference.added_to(mismatched or [filler_batch()])
        sums = row_log_probs(self.worker, batches)
        ratios = [
            value
            for batch, sums_R in zip(batches, sums, strict=True)
            if batch.row_values is not None
            for value in (sums_R - batch.row_values[ROW_REFERENCE]).tolist()
        ]
        parts = self._gather([sum(ratios), len(ratios)])
        total, count = (sum(part) for part in zip(*parts, strict=True))
        return max(total / max(count, 1), 0.0)

    def _with_log_prob_grads(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with the derivative of the losses over the global batch by the
        log-prob of each answer."""
        values = []
        for batch, sums_R in zip(batches, row_log_probs(self.worker, batches), strict=True):
            of_reference = (batch.row_values or {}).get(ROW_REFERENCE, torch.zeros_like(sums_R))
            values.append(torch.stack([sums_R, of_reference], dim=1))
        device = self.worker.platform.device
        rows = GlobalRows.gather(values, batches, self.worker.grid.dp.group, device)
        table_T2 = log_prob_grads(self.cfg, *rows.values_TH.cpu().unbind(1))
        return rows.scatter("log_prob_grads", table_T2, batches)

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all replicas in order."""
        return all_gather_json(value, self.worker.grid.dp.group, self.worker.platform.device)


def log_prob_grads(cfg: Config, sums_R: Tensor, reference_R: Tensor) -> Tensor:
    """Return, for the log-probs of all answers of a global batch, the derivative of the losses over
    it by each of them, and each answer's share of these losses: [R, 2] in float64."""
    leaf_R = sums_R.clone().requires_grad_()
    pairs = row_losses.Pairs.from_sums(leaf_R, reference_R, torch.ones_like(leaf_R))
    total = torch.zeros((), dtype=torch.float64)
    for name, weight in _global_losses(cfg).items():
        total = total + weight * row_losses.GLOBAL_LOSSES[name](pairs, cfg.preference).sum()
    [grad_R] = torch.autograd.grad(total, [leaf_R])
    share = total.detach() / max(len(leaf_R), 1)
    return torch.stack([grad_R, share.expand_as(grad_R)], dim=1)


def loss_function(cfg: Config, chosen_tokens: float, kl: float) -> LossFunction:
    """Return the loss of each example, as training/losses.py takes it."""
    if spec_of(cfg).records == "label":
        return _label_loss(cfg, kl)
    return _pair_loss(cfg, chosen_tokens)


def _pair_loss(cfg: Config, chosen_tokens: float) -> LossFunction:
    p, sft = cfg.preference, _sft_coef(cfg)
    losses = {name: w for name, w in losses_of(cfg).items() if name in row_losses.PAIR_LOSSES}
    is_mean = cfg.train.objective in ("orpo", "simpo")

    def pair_loss(log_probs_N: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = row_losses.Pairs.from_rows(log_probs_N, rows)
        loss_E = torch.zeros_like(pairs.chosen_E)
        for name, weight in losses.items():
            loss_E = loss_E + weight * row_losses.PAIR_LOSSES[name](pairs, p)
        if sft:
            loss_E = loss_E - sft * pairs.chosen_E / chosen_tokens
        if (grads_R2 := rows.values.get("log_prob_grads")) is not None:
            grad_E2, share_E2 = grads_R2.view(-1, 2, 2).unbind(2)
            sums_E2 = torch.stack([pairs.chosen_E, pairs.rejected_E], dim=1)
            loss_E = loss_E + (share_E2 + grad_E2 * (sums_E2 - sums_E2.detach())).sum(1)
        return loss_E, _pair_figures(pairs, p, is_mean)

    return pair_loss


def _pair_figures(pairs: row_losses.Pairs, p: PreferenceConfig, is_mean: bool) -> dict[str, Tensor]:
    """Return the figures of each pair, as TRL defines them: of means over tokens with losses that
    compare such means."""
    chosen, rejected = pairs.chosen_ratio.detach(), pairs.rejected_ratio.detach()
    if is_mean:
        chosen, rejected = chosen / pairs.chosen_tokens_E, rejected / pairs.rejected_tokens_E
    return {
        "rewards_chosen": p.beta * chosen,
        "rewards_rejected": p.beta * rejected,
        "rewards_margin": p.beta * (chosen - rejected),
        "reward_accuracy": (chosen > rejected).double(),
        "logps_chosen": pairs.chosen_E.detach(),
        "logps_rejected": pairs.rejected_E.detach(),
    }


def _label_loss(cfg: Config, kl: float) -> LossFunction:
    p, losses = cfg.preference, losses_of(cfg)

    def label_loss(log_probs_N: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
        sums_R = rows.sums(log_probs_N)
        reference_R = rows.values.get(ROW_REFERENCE)
        assert reference_R is not None or not len(sums_R)
        ratio_R = sums_R if reference_R is None else sums_R - reference_R
        loss_R = torch.zeros_like(sums_R)
        for name, weight in losses.items():
            loss_of = row_losses.LABEL_LOSSES[name]
            loss_R = loss_R + weight * loss_of(ratio_R, rows.is_rejected_R, p, kl)
        is_chosen_R = (~rows.is_rejected_R).double()
        rewards_R, logps_R = p.beta * ratio_R.detach(), sums_R.detach()
        report = {
            "share_chosen": is_chosen_R,
            "rewards_chosen": is_chosen_R * rewards_R,
            "rewards_rejected": (1 - is_chosen_R) * rewards_R,
            "logps_chosen": is_chosen_R * logps_R,
            "logps_rejected": (1 - is_chosen_R) * logps_R,
        }
        return loss_R, report

    return label_loss


def finished_figures(means: Figures, cfg: Config) -> Figures:
    """Return the reported figures. For labelled answers, means over examples become means over
    the answers with that label."""
    if spec_of(cfg).records != "label":
        return means
    means = dict(means)
    chosen = means.pop("share_chosen", 0.0)
    for name, share in (("chosen", chosen), ("rejected", 1 - chosen)):
        for kind in ("rewards", "logps"):
            value = means.pop(f"{kind}_{name}", 0.0)
            if share > 0:
                means[f"{kind}_{name}"] = value / share
    if {"rewards_chosen", "rewards_rejected"} <= {*means}:
        means["rewards_margin"] = means["rewards_chosen"] - means["rewards_rejected"]
    return means


def _global_losses(cfg: Config) -> dict[str, float]:
    names = row_losses.GLOBAL_LOSSES
    return {name: weight for name, weight in losses_of(cfg).items() if name in names}


def _sft_coef(cfg: Config) -> float:
    """Return the coefficient of the cross-entropy of chosen answers."""
    own, spec = cfg.preference.sft_coef, OBJECTIVES[cfg.train.objective]
    return (spec.sft_coef if own is None else own) + losses_of(cfg).get("sft", 0.0)


class EmbeddingObjective:
    """InfoNCE over the documents of the global batch, on one rank. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the queries of a global batch."""
        batches = batch.micro_batches
        (queries, total, *sums), grads_TH, gathered = self._loss(batches)
        if grads_TH is not None and gathered is not None:
            batches = gathered.scatter("embedding_grads", grads_TH.float(), batches)
        metrics = self.worker.forward_backward(batches, loss=embedding_grad_loss)
        figures = zip(row_losses.FIGURES, sums, strict=True)
        means = {name: value / queries for name, value in figures}
        return replace(metrics, loss=total / queries, means=metrics.means | means)

    def loss_sums(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[dict[str, float], GlobalRows | None]:
        """Return the queries of a global batch, the sums of their losses and figures, and on last
        stages the embeddings."""
        sums, _, gathered = self._loss(batches)
        return dict(zip(("queries", "loss", *row_losses.FIGURES), sums, strict=True)), gathered

    def _loss(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[list[float], Tensor | None, GlobalRows | None]:
        """Return the queries, their summed loss and figures on every rank, and on last stages the
        derivative of the loss by each embedding, and the embeddings."""
        grads_TH, gathered, stage = None, None, self.worker.stage
        sums = torch.zeros(2 + len(row_losses.FIGURES), dtype=torch.float64, device=stage.device)
        outputs = stage.evaluate(batches, embedding_head)
        if stage.grid.is_last_stage:
            embeddings = [each.embeddings_NH for each in outputs]
            gathered = GlobalRows.gather(embeddings, batches, stage.grid.dp.group, stage.device)
            rows = row_losses.RetrievalRows.from_examples(gathered.example_T)
            grads_TH, sums = row_losses.info_nce(gathered.values_TH, rows, self.cfg.embed)
        stage.grid.from_last_stage(sums)
        queries, *others = sums.tolist()
        return [max(queries, 1.0), *others], grads_TH, gathered


def embedding_grad_loss(embeddings_NH: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return for each example a loss whose derivatives are the `embedding_grads` of its rows, and
    whose value means nothing."""
    if "embedding_grads" not in rows.values:
        return embeddings_NH.new_zeros(0), {}
    return (embeddings_NH * rows.values["embedding_grads"]).sum(1), {}


class RerankObjective:
    """Losses of the logits of yes and no, on one rank. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the documents of a global batch, or with
        listwise over its positives."""
        examples, documents, positives = self._counts(batch.micro_batches)
        terms = positives if self.cfg.rerank.loss == "listwise" else documents
        loss, divisor = rerank_loss(self.cfg.rerank), max(terms, 1.0)
        metrics = self.worker.forward_backward(batch.micro_batches, loss=loss, divisor=divisor)
        accuracy = metrics.means["accuracy"] * examples / max(documents, 1.0)
        return replace(metrics, means=metrics.means | {"accuracy": accuracy})

    def scored(self, batches: Sequence[MicroBatch]) -> list["ScoredRow"]:
        """Return the logit of each document of a global batch, in order, on every rank."""
        scored = values_by_place(batches, self.worker.forward(batches))
        values = []
        for batch in batches:
            table_R2 = torch.zeros(len(batch.rows), 2, dtype=torch.float64)
            if batch.row_values is not None:
                last_R2 = torch.stack([scored[place][-1] for place in batch.rows])
                table_R2[:, 0] = last_R2[:, 0] - last_R2[:, 1]
                table_R2[:, 1] = batch.row_values[REJECTED]
            values.append(table_R2)
        group, device = self.worker.grid.dp.group, self.worker.platform.device
        gathered = GlobalRows.gather(values, batches, group, device)
        rows = zip(gathered.places, gathered.values_TH.tolist(), strict=True)
        return [ScoredRow(example, logit, bool(flag)) for (example, _), (logit, flag) in rows]

    def _counts(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return the numbers of examples, documents and positives in the global batch."""
        rejected = [batch.row_values[REJECTED] for batch in batches if batch.row_values is not None]
        return self.worker.grid.sum_of_replicas(
            sum(batch.num_examples for batch in batches),
            sum(len(each) for each in rejected),
            sum(int((~each).sum()) for each in rejected),
        )


@dataclass(frozen=True)
class ScoredRow:
    """A document of a reranker: its example, its logit of yes minus that of no, and its label."""

    example: int
    logit: float
    is_negative: bool


def rerank_loss(cfg: RerankConfig) -> LossFunction:
    """Return the loss of each document, as training/losses.py takes it."""

    def loss(log_probs_N: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
        yes_R, no_R = log_probs_N.double().view(-1, 2).unbind(1)
        logits_R, is_negative_R = yes_R - no_R, rows.is_rejected_R
        if cfg.loss == "listwise":
            loss_R = row_losses.listwise(logits_R, is_negative_R, rows.example_R)
        else:
            loss_R = row_losses.pointwise(logits_R, is_negative_R)
        is_right_R = (logits_R.detach() > 0) != is_negative_R
        return loss_R, {"accuracy": is_right_R.double()}

    return loss
