"""Losses of embeddings and rerankers: of the embeddings of a global batch, with the definitions of
sentence-transformers 6.2, and of the logits of documents.

Shapes: A queries, D documents, R rows (of embeddings: queries and documents), H width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.config.objective_configs import EmbedConfig

FIGURES = ("accuracy", "positive_similarity", "nearest_negative_similarity")
_QUERIES_AT_ONCE = 1024  # bounds the memory of their similarities to all documents


@dataclass(frozen=True)
class RetrievalRows:
    """Rows of a global batch. Those of a record are a query, its positive, and its negatives."""

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
    slopes_RH, sums = torch.zeros_like(leaf_RH), leaf_RH.new_zeros(2 + len(FIGURES))
    sums[0] = len(rows.query_A)
    for size, weight in zip(sizes, weights, strict=True):
        for start in range(0, len(rows.query_A), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            cut_RH = F.normalize(leaf_RH[:, :size], dim=1)
            cosine_AD = cut_RH[rows.query_A[part]] @ cut_RH[rows.document_D].T
            positive_A = rows.positive_A[part]
            loss_A = F.cross_entropy(cosine_AD / cfg.temperature, positive_A, reduction="none")
            loss = weight * loss_A.sum()
            slopes_RH += torch.autograd.grad(loss, [leaf_RH])[0]
            sums[1] += loss.detach()
            if size == max(sizes):
                sums[2:] += _figures(cosine_AD.detach(), positive_A)
    return slopes_RH, sums


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
