"""Gradients of embeddings and rerankers for a global batch.

The loss of an embedding depends on all documents of the global batch, so it takes the two passes of
GlobalRows.

Shapes: R rows of a micro-batch, N supervised places, T rows of the global batch, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vlm.config.objective_configs import RerankConfig
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.data.batches.micro_batch import REJECTED, MicroBatch
from megatron_vlm.model.head import embedding_head
from megatron_vlm.training.losses import LossFunction
from megatron_vlm.training.row_losses import FIGURES, RetrievalRows, info_nce, listwise, pointwise
from megatron_vlm.training.row_scores import GlobalRows, values_by_place
from megatron_vlm.training.stage_inputs import RowInputs
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class EmbeddingObjective:
    """InfoNCE over the documents of the global batch, on one rank. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the queries of a global batch."""
        batches = batch.micro_batches
        (queries, total, *sums), slopes_TH, gathered = self._loss(batches)
        if slopes_TH is not None and gathered is not None:
            batches = gathered.dealt("slopes", slopes_TH.float(), batches)
        metrics = self.worker.forward_backward(batches, loss=surrogate)
        means = {name: value / queries for name, value in zip(FIGURES, sums, strict=True)}
        return replace(metrics, loss=total / queries, means=metrics.means | means)

    def loss_sums(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[dict[str, float], GlobalRows | None]:
        """Return the queries of a global batch, the sums of their losses and figures, and on last
        stages the embeddings."""
        sums, _, gathered = self._loss(batches)
        return dict(zip(("queries", "loss", *FIGURES), sums, strict=True)), gathered

    def _loss(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[list[float], Tensor | None, GlobalRows | None]:
        """Return the queries, their summed loss and figures on every rank, and on last stages the
        derivative of the loss by each embedding, and the embeddings."""
        slopes_TH, gathered, stage = None, None, self.worker.stage
        sums = torch.zeros(2 + len(FIGURES), dtype=torch.float64, device=stage.device)
        outputs = stage.evaluate(batches, embedding_head)
        if stage.grid.is_last_stage:
            embeddings = [each.embeddings_NH for each in outputs]
            gathered = GlobalRows.gather(embeddings, batches, stage.grid.dp.group, stage.device)
            rows = RetrievalRows.from_examples(gathered.example_T)
            slopes_TH, sums = info_nce(gathered.values_TH, rows, self.cfg.embed)
        stage.grid.from_last_stage(sums)
        queries, *others = sums.tolist()
        return [max(queries, 1.0), *others], slopes_TH, gathered


def surrogate(embeddings_NH: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return for each example a loss of which only the derivative by each embedding counts."""
    if "slopes" not in rows.values:
        return embeddings_NH.new_zeros(0), {}
    return (embeddings_NH * rows.values["slopes"]).sum(1), {}


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
            loss_R = listwise(logits_R, is_negative_R, rows.example_R)
        else:
            loss_R = pointwise(logits_R, is_negative_R)
        is_right_R = (logits_R.detach() > 0) != is_negative_R
        return loss_R, {"accuracy": is_right_R.double()}

    return loss
