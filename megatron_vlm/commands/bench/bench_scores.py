"""Scores of a model before and after its training: their differences, and the file that keeps
them."""

import datetime
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_vlm.commands.bench.lmms_eval import TaskScore
from megatron_vlm.io.atomic import write_text
from megatron_vlm.report.bench_table import BENCH_FILE, BenchLine, Benchmark


def compare_scores(before: Sequence[TaskScore], after: Sequence[TaskScore]) -> list[BenchLine]:
    """Return a line for each score that both models have."""
    old = {(score.task, score.metric): score for score in before}
    return [
        _line(old[score.task, score.metric], score)
        for score in after
        if (score.task, score.metric) in old
    ]


def _line(before: TaskScore, after: TaskScore) -> BenchLine:
    """Compare two scores. Where both have a value for each sample, the standard error is that of
    the differences; otherwise it takes the two as independent."""
    names = before.samples.keys()
    error = None
    is_paired = len(names) > 1 and names == after.samples.keys()
    if is_paired:
        changes = [after.samples[name] - before.samples[name] for name in names]
        error = statistics.stdev(changes) / math.sqrt(len(changes))
    elif before.standard_error is not None and after.standard_error is not None:
        error = math.hypot(before.standard_error, after.standard_error)
    return BenchLine(
        before.task, before.metric, before.value, after.value, error, len(names) or None, is_paired
    )


def write_benchmark(folder: Path, suite: str, lines: Sequence[BenchLine]) -> Benchmark:
    """Write bench/scores.json in a folder, in place of a former one."""
    path = folder / BENCH_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now().isoformat(" ", "minutes")
    benchmark = Benchmark(suite, now, tuple(lines))
    write_text(path, json.dumps(asdict(benchmark), indent=1) + "\n")
    return benchmark


def shown_scores(scores: Sequence[TaskScore]) -> Iterator[str]:
    """Yield a line of text for each score."""
    for score in scores:
        error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
        yield f"{score.task} {score.metric} {score.value:.4f}{error}"
