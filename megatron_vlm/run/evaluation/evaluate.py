"""Evaluation of every held-out set. The answers to a few questions are kept for the report."""

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megatron_vlm.config.checks import check_candidates
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.tokens.sample_views import ShownTurn
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import GroupAxis
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.report.metrics_lines import Example, ExamplePart, ExampleTurn
from megatron_vlm.report.picture_uri import preview_uri
from megatron_vlm.run.evaluation.answer_metrics import Answer, AnswerMeter, mean_scores, remarks_on
from megatron_vlm.run.evaluation.held_out_sets import EvalSet
from megatron_vlm.run.evaluation.scores import (
    AnswerDecoder,
    distill_scores,
    embedding_scores,
    generated_answers,
    preference_scores,
    rank_answers,
    rerank_scores,
    token_scores,
)
from megatron_vlm.training.reference import with_reference
from megatron_vlm.training.row_objectives import (
    EmbeddingObjective,
    PreferenceObjective,
    RerankObjective,
)
from megatron_vlm.training.run_objective import DistillObjective, RewardObjective, TrainObjective
from megatron_vlm.training.worker import MegatronWorker


@dataclass(frozen=True)
class Evaluation:
    """The scores of one set, equal on every rank, and on rank 0 the answers."""

    name: str
    scores: dict[str, float]
    predictions: list[dict[str, Any]]  # for every question: where, answer, prediction
    examples: list[Example]  # a few of them, with prompt and pictures
    remarks: list[str] = field(default_factory=list)  # lines for people


class Evaluator:
    """The held-out sets of a run. Its methods are collectives."""

    def __init__(
        self,
        worker: MegatronWorker,
        cfg: Config,
        objective: TrainObjective | None = None,
        is_idle: bool = False,
        may_ask: bool = False,
    ):
        """Open the sets, unless the evaluator is idle. With `may_ask`, sets whose records only ask
        are left out."""
        self.objective = objective
        self.cfg, self.alive = cfg, worker.watchdog.alive
        self.candidates: list[str] | None = None
        if cfg.eval.candidates is not None:
            self.candidates = read_candidates(cfg.eval.candidates)
        self.sets = [] if is_idle else EvalSet.open_all(worker, cfg, may_ask)
        self.meter = AnswerMeter(cfg, worker)

    def keep_reference(self) -> None:
        """Compute or read the reference log-probs of all sets, with the initial weights."""
        self.sets = [
            replace(each, data=with_reference(each.worker, self.cfg, each.data, each.name, None))
            for each in self.sets
        ]

    def close(self) -> None:
        """End the processes of users' metrics."""
        self.meter.close()

    @cached_property
    def voice(self) -> AnswerDecoder:
        """The decoder of answers, which is read once and only if there are answers to decode."""
        return AnswerDecoder.from_config(self.cfg)

    def evaluate(self) -> Iterator[Evaluation]:
        """Yield the evaluation of every set in turn."""
        for held_out in self.sets:
            self.alive()
            yield self._evaluate(held_out)

    def _evaluate(self, held_out: EvalSet) -> Evaluation:
        start, worker = time.perf_counter(), held_out.worker
        scores, answers = self._measure(held_out)
        blind: list[Answer] = []
        if self.cfg.eval.blind:
            figures, blind = self._measure(replace(held_out, is_blind=True))
            scores |= {f"blind_{name}": value for name, value in figures.items()}
            pairs = zip(answers, blind, strict=True)
            changed = [not other.is_right for answer, other in pairs if answer.is_right]
            if changed:  # the share of the right answers that are wrong with grey pictures
                scores["needs_picture"] = fmean(changed)
        remarks = remarks_on(self.meter.metrics, answers, held_out.name)
        scores |= {"samples": held_out.samples, "seconds": time.perf_counter() - start}
        data = held_out.data
        if data is None or worker.grid.rank != 0:
            return Evaluation(held_out.name, scores, [], [], remarks)
        predictions = [_prediction(data, answer) for answer in answers]
        for line, other in zip(predictions, blind, strict=False):  # none, unless eval.blind is set
            line["blind_prediction"] = other.prediction
        few = choose_answers(answers, self.cfg.eval.examples)
        examples = [_example(data, answer) for answer in few]
        return Evaluation(held_out.name, scores, predictions, examples, remarks)

    def _measure(self, held_out: EvalSet) -> tuple[dict[str, float], list[Answer]]:
        """Return the scores of a set, and its answers in the order of the questions."""
        worker, alive = held_out.worker, self.alive
        scores = self._scores(held_out)
        answers: list[Answer] = []
        if self.candidates is not None:
            result = rank_answers(held_out, self.voice, self.candidates, alive)
            scores["ranking"], answers = result
        if self.meter.metrics:
            answers = generated_answers(held_out, self.voice, self.meter, alive)
        answers = _gather_answers(answers, worker.grid.dp, worker.platform.device)
        return scores | mean_scores(self.meter.metrics, answers), answers

    def _scores(self, held_out: EvalSet) -> dict[str, float]:
        match self.objective:
            case PreferenceObjective() | RewardObjective() as objective:
                return preference_scores(held_out, objective, self.alive)
            case DistillObjective() as objective:
                return distill_scores(held_out, objective, self.alive)
            case EmbeddingObjective() as objective:
                return embedding_scores(held_out, objective, self.alive)
            case RerankObjective() as objective:
                return rerank_scores(held_out, objective, self.alive)
            case _:
                return token_scores(held_out, self.alive)


def read_candidates(value: str | Sequence[str]) -> list[str]:
    """Read eval.candidates: a list, or a text file with one candidate in each line."""
    if isinstance(value, str):
        remedy = "eval.candidates names a text file"
        file = UntrustedFile(os.path.expanduser(value), ConfigError, remedy)
        value = [line for line in file.text().splitlines() if line.strip()]
    check_candidates(value)
    return list(value)


def write_predictions(folder: Path, evaluation: Evaluation, **facts: int) -> None:
    """Write FOLDER/SET.jsonl with the right answer and the model's answer to every question. Each
    line also has these facts, such as the step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(facts | line, ensure_ascii=False) + "\n" for line in evaluation.predictions]
    write_text(folder / f"{evaluation.name}.jsonl", "".join(lines))


def _gather_answers(answers: Sequence[Answer], dp: GroupAxis, device: torch.device) -> list[Answer]:
    """Gather the answers of all replicas, in the order in which the questions were distributed."""
    answer_lists = all_gather_json([astuple(answer) for answer in answers], dp.group, device)
    turns = itertools.zip_longest(*answer_lists)
    dealt = [answer for turn in turns for answer in turn if answer is not None]
    return [
        Answer((source, index), right, prediction, tuple(known), *measured)
        for (source, index), right, prediction, known, *measured in dealt
    ]


def _prediction(data: DataSet, answer: Answer) -> dict[str, Any]:
    """Return the line of an answer. Its scores are given where there are more than exact match."""
    where = data.where(answer.handle)
    line: dict[str, Any] = {"where": where, "answer": answer.right}
    if answer.answers:
        line["answers"] = list(answer.answers)
    line["prediction"] = answer.prediction
    if set(answer.scores) - {"exact_match"}:
        line["scores"] = dict(answer.scores)
    return line


def choose_answers(answers: Sequence[Answer], max_count: int) -> list[Answer]:
    """Select at most `max_count` answers. Wrong answers come first, since they teach more, but
    leave a third of the room to right ones if there are so many."""
    wrong, right = ([each for each in answers if each.is_right == kind] for kind in (False, True))
    wrong = wrong[: max_count - min(len(right), max_count // 3)]
    return [*wrong, *right[: max_count - len(wrong)]]


def _example(data: DataSet, answer: Answer) -> Example:
    where, turns = data.where(answer.handle), tuple[ExampleTurn, ...]()
    try:
        shown = data.show(answer.handle, pictures=True, all_answers=False)
    except DataError as error:
        where = str(error)
    else:
        turns = tuple(map(_example_turn, shown.turns[:-1]))
    return Example(where, answer.right, answer.prediction, turns, answer.answers)


def _example_turn(turn: ShownTurn) -> ExampleTurn:
    """Return the texts and pictures of a turn in their order; the first frame stands for a pair."""
    parts = []
    for piece in turn.pieces:
        if piece.view is not None and piece.view.pictures:
            parts.append(ExamplePart(image=preview_uri(piece.view.pictures[0])))
        elif piece.view is not None or not piece.special:
            parts.append(ExamplePart(piece.text))
    return ExampleTurn(turn.role, tuple(parts))
