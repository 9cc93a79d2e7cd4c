"""Metrics of generated answers: the built-in ones, and users' functions in processes of their
own."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from megatron_vlm.config.evaluation_checks import answer_metrics, is_user_metric, metric_name
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.distributed.agreement import all_reduce_max, fail_together
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.report.example_lines import is_right
from megatron_vlm.run.evaluation.answer_metrics import METRICS
from megatron_vlm.run.evaluation.held_out_sets import EvalSet
from megatron_vlm.training.worker import MegatronWorker
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

_POLL_S = 0.5  # between two signs of life while users' functions run


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
        self.metrics, self.device = answer_metrics(cfg), worker.platform.device
        self.pools: dict[str, RewardPool] = {}
        self.opened = ExitStack()
        with fail_together(self.device, ConfigError):
            for metric in filter(is_user_metric, self.metrics):
                if worker.grid.leads:
                    timeout = cfg.eval.metric_timeout
                    settings = RewardSettings(None, None, 1, timeout, None, metric=metric)
                    self.pools[metric] = pool = RewardPool(settings)
                    self.opened.callback(pool.close)

    def close(self) -> None:
        """End the processes."""
        self.opened.close()

    def measure(
        self, held_out: EvalSet, answers: Sequence[Answer], alive: Callable[[], None]
    ) -> list[Answer]:
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

    def _call(self, data: DataSet | None, answer: Answer) -> dict[str, "Future[dict[str, float]]"]:
        if data is None or not self.pools:
            return {}
        arguments = (answer.prediction, answer.references)
        record, where = data.raw(answer.handle), data.where(answer.handle)
        pools = self.pools.items()
        return {metric: pool.measure(*arguments, record, where) for metric, pool in pools}

    def _wait(self, calls: Sequence["Future[dict[str, float]]"], alive: Callable[[], None]) -> None:
        """Wait for users' functions, on all ranks together, so that no rank waits long in one
        collective."""
        is_waiting = True
        while is_waiting:
            pending = wait(calls, timeout=_POLL_S).not_done if calls else ()
            alive()
            is_waiting = bool(all_reduce_max(len(pending), self.device))


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


def _measured(
    metrics: Sequence[str], answer: Answer, calls: Mapping[str, "Future[dict[str, float]]"]
) -> Answer:
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
