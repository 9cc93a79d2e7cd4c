"""Every held-out set, scored; what the model said to a few questions, for the report."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batch.dataset import DataSet
from megatron_vlm.data.encode.views import ShownTurn, show_sample
from megatron_vlm.display.html import data_uri
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.evaluation.scores import Answer, Voice, exact_match, ranking, token_scores
from megatron_vlm.evaluation.sets import EvalSet, open_sets
from megatron_vlm.worker import MegatronWorker


@dataclass(frozen=True)
class Evaluation:
    """One set's scores, the same on every rank, and on rank 0 what was said."""

    name: str
    scores: dict[str, float]
    predictions: list[dict[str, str]]  # of all questions: where, answer, prediction
    examples: list[dict[str, Any]]  # a few of them, with prompt and pictures


class Examiner:
    """The held-out sets of a run. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config, alive: Callable[[], None]):
        """`alive` is called now and then: an evaluation may take long."""
        self.worker, self.cfg, self.alive = worker, cfg, alive
        self.candidates: list[str] | None = None
        if cfg.eval.candidates is not None:
            self.candidates = read_candidates(cfg.eval.candidates)
        self.sets = open_sets(worker, cfg)

    @cached_property
    def voice(self) -> Voice:
        """Read once, and only where answers are asked for."""
        return Voice.of(self.cfg)

    def examine(self) -> Iterator[Evaluation]:
        """Every set in turn."""
        for held_out in self.sets:
            self.alive()
            yield self._evaluate(held_out)

    def _evaluate(self, held_out: EvalSet) -> Evaluation:
        worker, cfg, start = self.worker, self.cfg, time.perf_counter()
        scores = token_scores(worker, cfg, held_out, self.alive)
        answers: list[Answer] = []
        if self.candidates is not None:
            found = ranking(worker, cfg, held_out, self.voice, self.candidates, self.alive)
            scores["ranking"], answers = found
        if cfg.eval.generate:
            scores["exact_match"], answers = exact_match(
                worker, cfg, held_out, self.voice, self.alive
            )
        scores |= {"samples": held_out.samples, "seconds": time.perf_counter() - start}
        answers = _gathered(answers)
        if held_out.data is None or dist.get_rank() != 0:
            return Evaluation(held_out.name, scores, [], [])
        data = held_out.data
        few = _few(answers, cfg.eval.examples)
        return Evaluation(
            held_out.name,
            scores,
            [_prediction(data, answer) for answer in answers],
            [_example(data, answer) for answer in few],
        )


def read_candidates(value: Any) -> list[str]:
    """eval.candidates: a list, or a text file with one in each line."""
    if isinstance(value, str):
        try:
            lines = Path(value).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"eval.candidates={value}: {error}; give a text file") from error
        value = [line for line in lines if line.strip()]
    names = [str(name) for name in value]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"eval.candidates has {len(names)} entries, {len(set(names))} of them different; "
            "give at least 2, each once"
        )
    return names


def write_predictions(folder: Path, evaluation: Evaluation) -> None:
    """FOLDER/SET.jsonl: every question's answer and what the model said."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in evaluation.predictions]
    (folder / f"{evaluation.name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_examples(run: Path, step: int, evaluation: Evaluation) -> None:
    """RUN/examples.json, which the report shows."""
    content = {"name": evaluation.name, "step": step, "examples": evaluation.examples}
    (run / "examples.json").write_text(json.dumps(content), encoding="utf-8")


def _gathered(answers: Sequence[Answer]) -> list[Answer]:
    """Of all replicas, in the order in which the questions were dealt out to them."""
    group = parallel_state.get_data_parallel_group()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, list(answers), group=group)
    turns = itertools.zip_longest(*found)
    return [answer for turn in turns for answer in turn if answer is not None]


def _prediction(data: DataSet, answer: Answer) -> dict[str, str]:
    source, place = answer.handle
    where = data.sources[source].where(int(data.indexes[source].records[place]))
    return {"where": where, "answer": answer.right, "prediction": answer.said}


def _few(answers: Sequence[Answer], most: int) -> list[Answer]:
    """Wrong answers first, they teach more; but not only those."""
    wrong = [answer for answer in answers if not answer.is_right][: most - most // 3]
    right = [answer for answer in answers if answer.is_right][: most - len(wrong)]
    return [*wrong, *right]


def _turn_text(turn: ShownTurn) -> str:
    return "".join(piece.text for piece in turn.pieces if not piece.special).strip()


def _example(data: DataSet, answer: Answer) -> dict[str, Any]:
    source, place = answer.handle
    number = sum(len(index) for index in data.indexes[:source]) + place
    try:
        shown = show_sample(data, number, pictures=True)
    except DataError as error:
        return {
            "where": str(error),
            "prompt": "",
            "answer": answer.right,
            "prediction": answer.said,
        }
    pieces = [piece for turn in shown.turns[:-1] for piece in turn.pieces]
    views = [piece.view for piece in pieces if piece.view is not None]
    return {
        **_prediction(data, answer),
        "prompt": "\n".join(map(_turn_text, shown.turns[:-1])),
        "images": [data_uri(view.pictures[0]) for view in views if view.pictures],
    }
