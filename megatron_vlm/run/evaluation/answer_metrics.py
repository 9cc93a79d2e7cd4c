"""Metrics of generated answers: the built-in ones, and users' functions in their own processes."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from megatron_vlm.config.evaluation_checks import answer_metrics, is_user_metric, metric_name
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.data.tokens.boxes_as_text import outlines_in_text
from megatron_vlm.distributed.agreement import all_reduce_max, fail_together
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.report.metrics_lines import is_right
from megatron_vlm.run.evaluation.held_out_sets import Alive, EvalSet
from megatron_vlm.training.worker import MegatronWorker
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

ANLS_THRESHOLD = 0.5  # a lower similarity counts as a wrong answer, not as a misread one
RELAXED_CHANGE = 0.05  # share by which a number may differ
IOU_THRESHOLD = 0.5  # from this overlap on, a box counts as found

_Box = tuple[float, float, float, float]  # x1, y1, x2, y2
_Boxes = Sequence[tuple[str, _Box]]  # with their labels
_Calls = Mapping[str, "Future[dict[str, float]]"]  # by metric
_NUMBER = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_FOUR = rf"{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}"
_CORNERS = rf"\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)"
_BOX_TEXT = re.compile(rf"\[{_FOUR}\]|\({_FOUR}\)|{_CORNERS}")
_POLL_S = 0.5  # between two signs of life while users' functions run


def exact_match(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return 1 if the answer is one of the right ones, word for word."""
    return {"exact_match": float(is_right(prediction, references))}


def anls(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return the average normalized Levenshtein similarity of DocVQA for one question: letter case
    and repeated white space do not count, and a similarity below a half is 0."""
    similarity = max(_similarity(prediction, reference) for reference in references)
    return {"anls": similarity if similarity >= ANLS_THRESHOLD else 0.0}


def relaxed_accuracy(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return 1 if the answer is right by ChartQA's rule: a number within 5 % of the right one, or
    any other text apart from letter case. A number is what Python reads as one; with a percent sign
    at its end it is divided by 100."""
    matches = any(_is_relaxed_match(prediction, reference) for reference in references)
    return {"relaxed_accuracy": float(matches)}


def iou(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return the mean overlap of boxes (intersection over union), and the share of boxes with an
    overlap of at least a half. A box that only one side has counts as 0. Return nothing if the
    right answer has no boxes, unless it is an empty list of them."""
    expected = [boxes for text in references if (boxes := read_boxes(text)) or text.strip() == "[]"]
    predicted = read_boxes(prediction)
    scores = [_overlap_scores(predicted, boxes) for boxes in expected]
    if not scores:
        return {}
    mean, found = max(scores)
    return {"iou": mean, "iou_accuracy": found}


METRICS: dict[str, Callable[[str, Sequence[str]], dict[str, float]]] = {
    "exact_match": exact_match,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
    "iou": iou,
}


def _similarity(prediction: str, reference: str) -> float:
    # The official code divides by the lengths before it changes the texts.
    length = max(len(prediction.upper()), len(reference.upper()))
    first, second = (" ".join(text.strip().lower().split()) for text in (prediction, reference))
    if not length:
        return 1.0
    if abs(len(first) - len(second)) > length * (1 - ANLS_THRESHOLD):
        return 0.0  # below the threshold in any case
    return 1 - _levenshtein(first, second) / length


def _levenshtein(first: str, second: str) -> int:
    """Return the least number of letters to insert, delete or replace."""
    row = list(range(len(second) + 1))
    for above, letter in enumerate(first):
        diagonal, row[0] = above, above + 1
        for place, other in enumerate(second, start=1):
            replaced = diagonal + (letter != other)
            diagonal = row[place]
            row[place] = min(replaced, row[place] + 1, row[place - 1] + 1)
    return row[-1]


def _is_relaxed_match(prediction: str, reference: str) -> bool:
    number, right = _number(prediction), _number(reference)
    if number is not None and right:  # to 0 there is no relative difference
        return abs(number - right) / abs(right) <= RELAXED_CHANGE
    return prediction.lower() == reference.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def read_boxes(text: str) -> _Boxes:
    """Return the boxes that an answer names, with their labels: objects of JSON with `bbox_2d` or
    `box_2d`, or else four numbers in brackets. They may count pixels or thousandths of the
    picture's sides, and x or y first: an overlap is the same, as long as the right answer does
    alike."""
    outlines = [each for each in outlines_in_text(text) if len(each.numbers) == 4]
    if outlines:
        return [(each.label.strip().lower(), _ordered(each.numbers)) for each in outlines]
    matches = _BOX_TEXT.finditer(text)
    found = ([float(part) for part in match.groups() if part is not None] for match in matches)
    return [("", _ordered(numbers)) for numbers in found]


def _ordered(numbers: Sequence[float]) -> _Box:
    x1, y1, x2, y2 = (float(number) for number in numbers)
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _overlap_scores(predicted: _Boxes, expected: _Boxes) -> tuple[float, float]:
    """Pair the boxes, the largest overlap first, and return both scores. Boxes whose labels differ
    are no pair; a missing label fits every other."""
    pairs = sorted(
        (
            (_iou(box, right), -i, -j)
            for i, (label, box) in enumerate(predicted)
            for j, (right_label, right) in enumerate(expected)
            if label == right_label or not label or not right_label
        ),
        reverse=True,
    )
    overlaps: list[float] = []
    taken: tuple[set[int], set[int]] = (set(), set())
    for overlap, i, j in pairs:
        if i not in taken[0] and j not in taken[1]:
            overlaps.append(overlap)
            taken[0].add(i)
            taken[1].add(j)
    count = max(len(predicted), len(expected))
    if not count:
        return 1.0, 1.0
    found = sum(overlap >= IOU_THRESHOLD for overlap in overlaps)
    return sum(overlaps) / count, found / count


def _iou(first: _Box, second: _Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    common = max(width, 0.0) * max(height, 0.0)
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (first, second)]
    union = sum(areas) - common
    return common / union if union > 0 else float(first == second)


@dataclass(frozen=True)
class Answer:
    """The model's answer to a question, with its scores by the metrics of eval.metrics."""

    handle: Handle
    right: str
    prediction: str
    answers: tuple[str, ...] = ()  # all right answers, if the record lists them
    scores: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)  # errors of users' metrics

    @property
    def references(self) -> tuple[str, ...]:
        """The right answers."""
        return self.answers or (self.right,)

    @property
    def is_right(self) -> bool:
        return is_right(self.prediction, self.references)


class AnswerMeter:
    """The metrics of a run. Only the ranks that load data call users' functions."""

    def __init__(self, cfg: Config, worker: MegatronWorker):
        """Start the processes of users' functions. A collective."""
        self.metrics = answer_metrics(cfg)
        self.pools: dict[str, RewardPool] = {}
        self.opened = ExitStack()
        with fail_together(ConfigError):
            for metric in filter(is_user_metric, self.metrics):
                if worker.grid.leads:
                    settings = RewardSettings("metric", metric, 1, cfg.eval.metric_timeout, None)
                    self.pools[metric] = pool = RewardPool(settings)
                    self.opened.callback(pool.close)

    def close(self) -> None:
        """End the processes."""
        self.opened.close()

    def measure(self, held_out: EvalSet, answers: Sequence[Answer], alive: Alive) -> list[Answer]:
        """Return the answers of this replica with their scores. A collective of all ranks."""
        calls = [self._call(held_out.data, answer) for answer in answers]
        if any(map(is_user_metric, self.metrics)):
            self._wait([call for by_metric in calls for call in by_metric.values()], alive)
        measured = [_measured(self.metrics, *each) for each in zip(answers, calls, strict=True)]
        # The other ranks of the replica do not have the records.
        shared = held_out.share([(answer.scores, answer.failures) for answer in measured])
        return [
            replace(answer, scores=scores, failures=failures)
            for answer, (scores, failures) in zip(answers, shared, strict=True)
        ]

    def _call(self, data: DataSet | None, answer: Answer) -> _Calls:
        if data is None or not self.pools:
            return {}
        arguments = (answer.prediction, answer.references)
        record, where = data.raw(answer.handle), data.where(answer.handle)
        pools = self.pools.items()
        return {metric: pool.measure(*arguments, record, where) for metric, pool in pools}

    def _wait(self, calls: Sequence["Future[dict[str, float]]"], alive: Alive) -> None:
        """Wait on all ranks together, so that none waits long in one collective."""
        is_waiting = True
        while is_waiting:
            pending = wait(calls, timeout=_POLL_S).not_done if calls else ()
            alive()
            is_waiting = bool(all_reduce_max(len(pending)))


def mean_scores(metrics: Sequence[str], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean of each score over the answers that have it, and how often each of users'
    metrics failed. The order of the answers is the same at each layout, and so are the means."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.scores.items():
            values.setdefault(name, []).append(value)
    means = {name: math.fsum(column) / len(column) for name, column in values.items()}
    for metric in metrics:
        if failed := sum(metric in answer.failures for answer in answers):
            means[f"{metric_name(metric)}_failed"] = failed
    return means


def remarks_on(metrics: Sequence[str], answers: Sequence[Answer], name: str) -> list[str]:
    """Return a line for each metric that failed, or that has no score for a set."""
    lines = []
    for metric in metrics:
        errors = [answer.failures[metric] for answer in answers if metric in answer.failures]
        if errors:
            count = f"{len(errors):,} of {len(answers):,} answers of {name}"
            lines.append(f"eval.metrics: {metric} has no score for {count}; first {errors[0]}")
        elif metric == "iou" and answers and not any("iou" in each.scores for each in answers):
            lines.append(f"eval.metrics: no right answer of {name} has boxes, so there is no iou")
    return lines


def _measured(metrics: Sequence[str], answer: Answer, calls: _Calls) -> Answer:
    scores: dict[str, float] = {}
    failures: dict[str, str] = {}
    for metric in metrics:
        if metric in METRICS:
            scores |= METRICS[metric](answer.prediction, answer.references)
        elif metric in calls:
            name = metric_name(metric)
            try:
                numbers = calls[metric].result()
            except (DataError, ConfigError) as error:
                failures[metric] = str(error)
            else:
                scores |= {f"{name}_{key}" if key else name: v for key, v in numbers.items()}
    return replace(answer, scores=scores, failures=failures)
