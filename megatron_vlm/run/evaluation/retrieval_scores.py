"""Scores of embeddings and rerankers: recall and nDCG, as sentence-transformers defines them.

Shapes: D documents, H width.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.records.record import Conversation, Image, Record, Video
from megatron_vlm.run.evaluation.held_out_sets import Alive, EvalSet
from megatron_vlm.training.retrieval_step import (
    FIGURES,
    EmbeddingObjective,
    RerankObjective,
    ScoredRow,
)
from megatron_vlm.training.row_losses import listwise, pointwise

_QUERIES_AT_ONCE = 256  # queries whose similarities to all documents are in memory together


def embedding_scores(
    held_out: EvalSet, objective: EmbeddingObjective, alive: Alive
) -> dict[str, float]:
    """Return the loss of a set, and recall and nDCG among all of its documents. A collective."""
    sums, start = dict.fromkeys(("queries", "loss", *FIGURES), 0.0), 0
    embeddings: list[Tensor] = []
    rows: list[tuple[int, int]] = []  # sample and row of each embedding
    for batch in held_out.batches():
        batch_sums, gathered = objective.loss_sums(batch.micro_batches)
        sums = {name: value + batch_sums[name] for name, value in sums.items()}
        if gathered is not None:
            embeddings.append(gathered.values_TH.cpu())
            rows += [(start + sample, row) for sample, row in gathered.places]
        start += batch.figures.samples
        alive()
    names = held_out.share(None if held_out.data is None else _names_of_rows(held_out.data))
    ks = held_out.cfg.eval.recall_at
    ranks: list[list[int]] = []
    if embeddings:
        ranks = _ranks_in_corpus(torch.cat(embeddings), rows, names)
    scores = torch.tensor([*retrieval_metrics(ranks, ks).values()], dtype=torch.float64)
    scores = scores.to(held_out.worker.platform.device)
    held_out.worker.grid.from_last_stage(scores)
    queries = max(sums.pop("queries"), 1.0)
    means = {name: value / queries for name, value in sums.items()}
    return means | dict(zip(retrieval_metrics([], ks), scores.tolist(), strict=True))


def rerank_scores(held_out: EvalSet, objective: RerankObjective, alive: Alive) -> dict[str, float]:
    """Return the loss of a set, the share of documents judged as they are labelled, and recall and
    nDCG among the documents of records with positives and negatives. A collective."""
    by_example: dict[tuple[int, int], list[ScoredRow]] = {}
    for number, batch in enumerate(held_out.batches()):
        for row in objective.scored(batch.micro_batches):
            by_example.setdefault((number, row.example), []).append(row)
        alive()
    losses, right, ranks = list[float](), list[float](), list[list[int]]()
    for documents in by_example.values():
        logits = torch.tensor([row.logit for row in documents], dtype=torch.float64)
        negative = torch.tensor([row.is_negative for row in documents])
        if held_out.cfg.rerank.loss == "listwise":
            loss = listwise(logits, negative, torch.zeros(len(logits)))[~negative]
        else:
            loss = pointwise(logits, negative)
        losses += loss.tolist()
        right += ((logits > 0) != negative).double().tolist()
        if 0 < int(negative.sum()) < len(negative):
            ranks.append(ranks_of(logits, (~negative).nonzero()[:, 0].tolist()))
    columns = {"loss": losses, "accuracy": right}
    means = {name: math.fsum(each) / max(len(each), 1) for name, each in columns.items()}
    return means | retrieval_metrics(ranks, held_out.cfg.eval.recall_at)


def retrieval_metrics(ranks: Iterable[Sequence[int]], ks: Sequence[int]) -> dict[str, float]:
    """Return the means over queries of recall@k and nDCG@k, from the ranks of the relevant
    documents of each query, counted from 1. Without queries they are 0."""
    ranks = list(ranks)
    scores: dict[str, float] = {}
    for k in ks:
        recalls = [sum(rank <= k for rank in own) / len(own) for own in ranks]
        scores[f"recall@{k}"] = math.fsum(recalls) / max(len(ranks), 1)
    for k in ks:
        gains = [_gain(rank for rank in own if rank <= k) for own in ranks]
        ideal = [_gain(range(1, min(len(own), k) + 1)) for own in ranks]
        ratios = [gain / best for gain, best in zip(gains, ideal, strict=True)]
        scores[f"ndcg@{k}"] = math.fsum(ratios) / max(len(ranks), 1)
    return scores


def _gain(ranks: Iterable[int]) -> float:
    return math.fsum(1 / math.log2(rank + 1) for rank in ranks)


def ranks_of(scores_D: Tensor, relevant: Sequence[int]) -> list[int]:
    """Return the ranks of the relevant documents. Among equal scores they come last, so that a
    model that scores all alike has found nothing."""
    others_D = torch.ones(len(scores_D), dtype=torch.bool)
    others_D[list(relevant)] = False
    own = scores_D[list(relevant)].sort(descending=True).values
    better = (scores_D[others_D] >= own[:, None]).sum(dim=1)
    return [place + 1 + int(count) for place, count in enumerate(better)]


def _ranks_in_corpus(
    embeddings: Tensor, rows: Sequence[tuple[int, int]], names: Sequence[Sequence[str]]
) -> list[list[int]]:
    """Return the ranks of each query's positives among all documents of the set. A document or a
    query that comes several times counts once."""
    documents: dict[str, int] = {}  # number of the row of each document
    queries: dict[str, int] = {}
    relevant: dict[str, set[str]] = {}
    for number, (sample, row) in enumerate(rows):
        if row:
            documents.setdefault(names[sample][row], number)
        else:
            queries.setdefault(names[sample][0], number)
            relevant.setdefault(names[sample][0], set()).add(names[sample][1])
    place = {name: number for number, name in enumerate(documents)}
    corpus_DH = embeddings[list(documents.values())].double()
    ranks = []
    query_names = list(queries)
    for start in range(0, len(query_names), _QUERIES_AT_ONCE):
        part = query_names[start : start + _QUERIES_AT_ONCE]
        scores = embeddings[[queries[name] for name in part]].double() @ corpus_DH.T
        for name, scores_D in zip(part, scores, strict=True):
            found = sorted(place[document] for document in relevant[name])
            ranks.append(ranks_of(scores_D, found))
    return ranks


def _names_of_rows(data: DataSet) -> list[list[str]]:
    """Return a digest of each row of each sample, in the order of evaluation. Rows with the same
    text and pictures have the same one."""
    names = []
    for source, sample in data.order.epoch(0).tolist():
        handle = (source, sample)
        chats = data.readers[source].chats(data.raw(handle), data.where(handle))
        names.append([_digest(chat) for chat, _ in chats])
    return names


def _digest(record: Record) -> str:
    assert isinstance(record, Conversation)
    hasher = hashlib.blake2b(digest_size=12)
    for turn in record.turns:
        for part in (turn.role, *turn.parts):
            hasher.update(b"\0" + _content(part))
    return hasher.hexdigest()


def _content(part: Any) -> bytes:
    """Return bytes that identify a part of a message."""
    if isinstance(part, Image):
        return b"image" + _content(part.source)
    if isinstance(part, Video):
        frames = part.source if isinstance(part.source, tuple) else (part.source,)
        return b"video" + b"\0".join(map(_content, frames))
    if isinstance(part, PIL.Image.Image):
        return repr((part.size, part.mode)).encode() + part.tobytes()
    return part if isinstance(part, bytes) else str(part).encode()
