"""Scores of a set: loss, token accuracy, generated answers, ranking of candidates; and of
embeddings and rerankers recall and nDCG, as sentence-transformers defines them.

Shapes: N supervised tokens, V this rank's part of the padded vocabulary, D documents, H width.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import PIL.Image
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.records.record import Conversation, Image, Record, Video
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.data.tokens.tokenizer import end_ids, read_tokenizer
from megatron_vlm.distributed.device import to_device
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_family
from megatron_vlm.model.head import HeadOutput, hits_head
from megatron_vlm.run.evaluation.answer_metrics import Answer, AnswerMeter
from megatron_vlm.run.evaluation.held_out_sets import Alive, EvalSet, Question
from megatron_vlm.training.generate import candidate_log_probs, generate
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.row_losses import FIGURES, listwise, pointwise
from megatron_vlm.training.row_objectives import (
    EmbeddingObjective,
    PreferenceObjective,
    RerankObjective,
    ScoredRow,
    finished_figures,
)
from megatron_vlm.training.row_scores import score_rows
from megatron_vlm.training.run_objective import DistillObjective, RewardObjective

BLOCK = 64  # questions held in memory together


def token_scores(held_out: EvalSet, alive: Alive) -> dict[str, float]:
    """Return the weighted mean loss of the supervised tokens, and the share of them that the model
    finds most likely. A collective."""
    stage = held_out.worker.stage
    totals = torch.zeros(4, dtype=torch.float64, device=stage.device)
    for batch in held_out.batches():
        totals += _count_tokens(stage, batch.micro_batches)
        alive()
    dist.all_reduce(totals, group=stage.grid.dp.group)
    log_prob, right, count, weight = totals.tolist()
    return {"loss": -log_prob / (weight or 1.0), "token_accuracy": right / max(count, 1)}


def preference_scores(
    held_out: EvalSet, objective: PreferenceObjective | RewardObjective, alive: Alive
) -> dict[str, float]:
    """Return the mean loss of a set's examples, and the figures of its answers. A collective."""
    sums: dict[str, float] = {}
    for batch in held_out.batches():
        for name, value in objective.scores(batch.micro_batches, batch.mismatched).items():
            sums[name] = sums.get(name, 0.0) + value
        alive()
    count = max(sums.pop("examples", 0.0), 1.0)
    return finished_figures({name: value / count for name, value in sums.items()}, held_out.cfg)


def distill_scores(
    held_out: EvalSet, objective: DistillObjective, alive: Alive
) -> dict[str, float]:
    """Return the mean loss of the supervised tokens of a set, and its parts. A collective."""
    sums: dict[str, float] = {}
    for batch in held_out.batches():
        for name, value in objective.scores(batch.micro_batches).items():
            sums[name] = sums.get(name, 0.0) + value
        alive()
    loss, weight, tokens = (sums.pop(name, 0.0) for name in ("loss", "weight", "tokens"))
    means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
    return {"loss": loss / (weight or 1.0), **means}


def generated_answers(
    held_out: EvalSet, voice: "AnswerDecoder", meter: AnswerMeter, alive: Alive
) -> list[Answer]:
    """Return this replica's answers, generated greedily, with their scores. A collective."""
    settings = held_out.cfg.eval

    def answer(questions: Sequence[Question]) -> list[str]:
        prompts = [voice.prompt(question) for question in questions]
        limits = (settings.max_new_tokens, voice.end_ids, settings.batch_size)
        completions = generate(held_out.worker.stage, prompts, *limits)
        return [voice.text([*voice.prefill_ids, *ids]) for ids in completions]

    measure = partial(meter.measure, held_out, alive=alive)
    return _answers(held_out, voice, answer, alive, measure)


def rank_answers(
    held_out: EvalSet, voice: "AnswerDecoder", candidates: Sequence[str], alive: Alive
) -> tuple[float, list[Answer]]:
    """Return the share of questions whose right answer has the highest log-prob of all candidates,
    and this replica's answers. A candidate follows eval.prefill."""
    stage, cfg = held_out.worker.stage, held_out.cfg
    texts = [cfg.eval.prefill + candidate for candidate in candidates]
    ids = [[*voice.tokens(text), voice.end_ids[0]] for text in texts]
    stripped, rows = {text.strip() for text in texts}, cfg.train.micro_batch_size

    def answer(questions: Sequence[Question]) -> list[str]:
        choices = []
        missing = stage.global_max(len(questions)) - len(questions)
        for question in questions:
            alive()
            if (right := voice.text(question.answer_ids)) not in stripped:
                raise DataError(
                    f"lacks the answer {right!r} among its {len(texts)} with the prefill, such as "
                    f"{texts[0]!r}",
                    key="eval.candidates",
                    remedy="correct eval.candidates or eval.prefill",
                )
            log_probs = candidate_log_probs(stage, question.prompt, ids, rows)
            choices.append(texts[max(range(len(texts)), key=log_probs.__getitem__)].strip())
        for _ in range(missing):
            score_rows(stage, [], 1.0)  # Replicas that share its experts have more questions.
        return choices

    answers = _answers(held_out, voice, answer, alive)
    right = sum(answer.is_right for answer in answers)
    totals = torch.tensor([right, len(answers)], dtype=torch.float64, device=stage.device)
    dist.all_reduce(totals, group=stage.grid.dp.group)
    return float(totals[0] / totals[1].clamp(min=1)), answers


@dataclass(frozen=True)
class AnswerDecoder:
    """The tokenizer, and the tokens that begin every answer."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    prefill_ids: tuple[int, ...]

    @staticmethod
    def from_config(cfg: Config) -> "AnswerDecoder":
        tokenizer = read_tokenizer(cfg.model.path, cfg.data.add_tokens)
        # A space belongs to the token of the word after it.
        prefill = cfg.eval.prefill.rstrip()
        ends = end_ids(tokenizer, read_family(cfg.model.path).chat)
        decoder = AnswerDecoder(tokenizer, ends, ())
        return replace(decoder, prefill_ids=tuple(decoder.tokens(prefill))) if prefill else decoder

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text inside a row, without those that begin one."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, question: Question) -> Row:
        """Return the question with the beginning of its answer."""
        ids_S = torch.cat([question.prompt.ids_S, torch.tensor(self.prefill_ids, dtype=torch.long)])
        return replace(question.prompt, ids_S=ids_S, labels_S=torch.full_like(ids_S, IGNORE))

    def text(self, ids: Sequence[int]) -> str:
        """Decode an answer for comparison, without the white space around it."""
        return str(self.tokenizer.decode(list(ids))).strip()


def _answers(
    held_out: EvalSet,
    voice: AnswerDecoder,
    answer: Callable[[Sequence[Question]], list[str]],
    alive: Alive,
    measure: Callable[[list[Answer]], list[Answer]] = list,
) -> list[Answer]:
    handles, stage = held_out.handles(), held_out.worker.stage
    answers: list[Answer] = []
    for start in range(0, stage.global_max(len(handles)), BLOCK):
        alive()
        questions = held_out.ask(handles[start : start + BLOCK])
        block = [
            Answer(each.handle, voice.text(each.answer_ids), prediction, each.references)
            for each, prediction in zip(questions, answer(questions), strict=True)
        ]
        answers += measure(block)
    return answers


def _count_tokens(stage: Stage, batches: Sequence[MicroBatch]) -> Tensor:
    """Return [4]: the weighted sum of the supervised tokens' log-probs; how many of these tokens
    are the most likely ones; their count; the sum of their weights."""
    outputs = stage.evaluate(batches, hits_head)
    totals = torch.zeros(4, dtype=torch.float64, device=stage.device)
    if stage.grid.is_last_stage:
        totals = torch.stack(list(map(_score, batches, outputs))).sum(0)
    stage.grid.from_last_stage(totals)
    return totals


def _score(batch: MicroBatch, output: HeadOutput) -> Tensor:
    assert output.log_probs_M is not None and output.hits_N is not None
    log_probs_N, hits_N = output.log_probs_M.double(), output.hits_N.double()
    count = torch.full_like(log_probs_N.sum(), log_probs_N.numel())
    weight = count
    if (weights_M := batch.columns.get("loss_weights")) is not None:
        weights_N = to_device(weights_M, log_probs_N.device)
        log_probs_N, weight = log_probs_N * weights_N, weights_N.double().sum()
    return torch.stack([log_probs_N.sum(), hits_N.sum(), count, weight])


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
