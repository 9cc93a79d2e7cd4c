"""Gradients of embeddings and rerankers for a global batch.

The loss of an embedding depends on all documents of the global batch. So a forward pass without
gradients comes first, the replicas gather the embeddings, and a second pass has a surrogate loss
with the same derivative by each embedding. The activations of one micro-batch are in memory at a
time, as for other losses.

Shapes: R rows of a micro-batch, N supervised places, T rows of the global batch, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.config.objective_configs import RerankConfig
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.data.batches.micro_batch import REJECTED, MicroBatch, RowPlace
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.model.head import embedding_head
from megatron_vlm.training.losses import LossFunction
from megatron_vlm.training.row_losses import FIGURES, RetrievalRows, info_nce, listwise, pointwise
from megatron_vlm.training.row_scores import values_by_place
from megatron_vlm.training.stage_inputs import RowInputs
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


@dataclass(frozen=True)
class Gathered:
    """A value of each row of a global batch, in the order of the rows, on last stages."""

    values_TH: Tensor
    places: tuple[RowPlace, ...]  # MicroBatch.rows
    local: tuple[int, ...]  # numbers of this replica's rows, micro-batch after micro-batch

    @property
    def example_T(self) -> Tensor:
        """Number of each row's example in the global batch."""
        examples = torch.tensor([example for example, _ in self.places], dtype=torch.long)
        return examples.to(self.values_TH.device)


def gather_rows(
    outputs: Sequence[Tensor], batches: Sequence[MicroBatch], grid: RankGroups
) -> Gathered:
    """Gather a value of each row from all replicas. The order does not depend on the layout. A
    collective of the last stages."""
    local = torch.cat(
        [output for output, batch in zip(outputs, batches, strict=True) if batch.rows]
        or [outputs[0][:0]]
    )
    own = [place for batch in batches for place in batch.rows]
    by_replica = all_gather_json(own, grid.dp.group, local.device)
    padded = local.new_zeros(max(map(len, by_replica)), *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in by_replica]
    dist.all_gather(parts, padded, group=grid.dp.group)
    values = torch.cat([part[: len(of)] for part, of in zip(parts, by_replica, strict=True)])
    flat: list[RowPlace] = [(example, row) for of in by_replica for example, row in of]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    number = {flat[old]: new for new, old in enumerate(order)}
    ordered = values[torch.tensor(order, dtype=torch.long, device=values.device)]
    return Gathered(ordered, tuple(flat[old] for old in order), tuple(number[p] for p in own))


class EmbeddingObjective:
    """InfoNCE over the documents of the global batch, on one rank. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg

    def forward_backward(self, batch: StepBatch) -> StepMetrics:
        """Compute the gradients of the mean loss over the queries of a global batch."""
        batches = batch.micro_batches
        (queries, total, *sums), slopes_TH, gathered = self._loss(batches)
        if slopes_TH is not None and gathered is not None:
            batches = _with_slopes(batches, slopes_TH, gathered)
        metrics = self.worker.forward_backward(batches, loss=surrogate)
        means = {name: value / queries for name, value in zip(FIGURES, sums, strict=True)}
        return replace(metrics, loss=total / queries, means=metrics.means | means)

    def loss_sums(self, batches: Sequence[MicroBatch]) -> tuple[dict[str, float], Gathered | None]:
        """Return the queries of a global batch, the sums of their losses and figures, and on last
        stages the embeddings."""
        sums, _, gathered = self._loss(batches)
        return dict(zip(("queries", "loss", *FIGURES), sums, strict=True)), gathered

    def _loss(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[list[float], Tensor | None, Gathered | None]:
        """Return the queries, their summed loss and figures on every rank, and on last stages the
        derivative of the loss by each embedding, and the embeddings."""
        slopes_TH, gathered, stage = None, None, self.worker.stage
        sums = torch.zeros(2 + len(FIGURES), dtype=torch.float64, device=stage.device)
        outputs = stage.evaluate(batches, embedding_head)
        if stage.grid.is_last_stage:
            gathered = gather_rows([each.embeddings_NH for each in outputs], batches, stage.grid)
            rows = RetrievalRows.from_examples(gathered.example_T)
            slopes_TH, sums = info_nce(gathered.values_TH, rows, self.cfg.embed)
        stage.grid.from_last_stage(sums)
        queries, *others = sums.tolist()
        return [max(queries, 1.0), *others], slopes_TH, gathered


def _with_slopes(
    batches: Sequence[MicroBatch], slopes_TH: Tensor, gathered: Gathered
) -> list[MicroBatch]:
    """Return the batches with the derivative of the loss by the embedding of each row."""
    local_RH = slopes_TH[torch.tensor(gathered.local, dtype=torch.long, device=slopes_TH.device)]
    parts = local_RH.float().split([len(batch.rows) for batch in batches])
    return [batch.with_row_values(slopes=part) for batch, part in zip(batches, parts, strict=True)]


def surrogate(embeddings_NH: Tensor, rows: RowInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return for each example a loss with the right derivative by each embedding, and no
    meaning."""
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
        flags = {
            place: flag
            for batch in batches
            if batch.row_values is not None
            for place, flag in zip(batch.rows, batch.row_values[REJECTED].tolist(), strict=True)
        }
        local = [
            (place, float(row_SJ[-1, 0] - row_SJ[-1, 1]), flags[place])
            for place, row_SJ in scored.items()
        ]
        parts = all_gather_json(local, self.worker.grid.dp.group, self.worker.platform.device)
        rows = sorted(row for part in parts for row in part)
        return [ScoredRow(example, *values) for (example, _), *values in rows]

    def _counts(self, batches: Sequence[MicroBatch]) -> tuple[float, float, float]:
        """Return the numbers of examples, documents and positives in the global batch."""
        rejected = [batch.row_values[REJECTED] for batch in batches if batch.row_values is not None]
        local = [
            sum(batch.num_examples for batch in batches),
            sum(len(each) for each in rejected),
            sum(int((~each).sum()) for each in rejected),
        ]
        parts = all_gather_json(local, self.worker.grid.dp.group, self.worker.platform.device)
        examples, documents, positives = (sum(part) for part in zip(*parts, strict=True))
        return float(examples), float(documents), float(positives)


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
