"""What `inspect` reports about a whole data set: statistics, faults, padding and balance.

Sizes come from the index alone: nothing is decoded for them.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import (
    Balance,
    Limits,
    RowSize,
    measure,
    naive_plan,
    plan_batch,
)
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.data_warnings import passed_over
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.media.video import CHOSEN
from megatron_vlm.data.tokens.sample_views import ShownSample

MOST_STEPS = 500  # whose plans are measured: planning a whole large epoch would take minutes


@dataclass(frozen=True)
class Column:
    """One measure of every sample."""

    name: str
    values: np.ndarray

    @property
    def summary(self) -> tuple[float, ...]:
        """The figures that SUMMARY names."""
        low, median, p95, high = np.percentile(self.values, (0, 50, 95, 100)).tolist()
        return (int(self.values.sum()), low, median, float(self.values.mean()), p95, high)


SUMMARY = ("total", "min", "median", "mean", "p95", "max")
SOURCE_COUNTS = ("records", "samples", "dropped", "wrong", "per epoch")
Source = tuple[str, float, tuple[int, ...]]  # name, weight, and the figures of SOURCE_COUNTS


@dataclass(frozen=True)
class BatchingMethod:
    """One way of forming micro-batches, over all measured steps."""

    name: str
    padding: float  # part of all positions that is padding
    imbalance: float  # cost of the busiest rank over the mean rank's, mean over steps
    worst: float  # the same, of the worst step
    micro_batches: float  # of a step, mean


@dataclass(frozen=True)
class Batching:
    """The first epoch's global batches."""

    ranks: int
    batch_size: int
    limits: Limits
    steps: int
    measured: int  # of these
    ways: tuple[BatchingMethod, ...]

    @property
    def caption(self) -> str:
        """What was measured, in a sentence."""
        rows, tokens = self.limits.rows, self.limits.tokens
        size = f"train.micro_batch_size={rows}"
        if tokens is not None:
            size = f"train.micro_batch_tokens={tokens}"
        steps = f"{self.steps:,} steps" if self.steps > 1 else "the one step"
        if self.measured < self.steps:
            steps = f"the first {self.measured:,} of {self.steps:,} steps"
        return (
            f"Over {steps} of the first epoch: train.global_batch_size={self.batch_size}, {size}, "
            f"{self.ranks:,} data parallel rank{'s' if self.ranks > 1 else ''}. "
            "Busiest rank: its cost over the mean rank's."
        )


@dataclass(frozen=True)
class Inspection:
    """Everything that `inspect` shows."""

    settings: tuple[tuple[str, str], ...]
    num_samples: int
    shown: tuple[ShownSample, ...]
    sources: tuple[Source, ...]
    columns: tuple[Column, ...]
    dropped: tuple[tuple[str, str], ...]  # place and rule
    errors: tuple[str, ...]
    passed: str  # the keys that nothing is made of, in a sentence; or nothing
    batching: Batching

    @property
    def rules(self) -> list[tuple[str, int, str]]:
        """Each rule that dropped records, how many, and where the first was; most first."""
        counts = Counter(rule for _, rule in self.dropped)
        first = {rule: where for where, rule in reversed(self.dropped)}
        return [(rule, count, first[rule]) for rule, count in counts.most_common()]


def collect_statistics(
    cfg: Config, data: DataSet, numbers: Sequence[int], ranks: int, pictures: bool
) -> Inspection:
    """Everything about a data set; the samples with these numbers are shown."""
    faults = [index.faults for index in data.indexes]
    titles = {"supervised": "trained tokens"}
    columns = tuple(
        Column(titles.get(name, name), np.concatenate([getattr(i, name) for i in data.indexes]))
        for name in ("tokens", "supervised", "images", "patches")
    )
    return Inspection(
        _settings(cfg),
        sum(map(len, data.indexes)),
        tuple(data.show(data.handle(number), pictures, number) for number in numbers),
        tuple(_sources(data)),
        columns,
        tuple(entry for fault in faults for entry in fault.dropped),
        tuple(message for fault in faults for message in fault.errors),
        next(passed_over("data.train", data, cfg.data), ""),
        measure_batching(cfg, data, ranks),
    )


def column_figure(value: float) -> str:
    """1,234 or 12.5: at most one decimal."""
    return f"{value:,.1f}".removesuffix(".0")


def _settings(cfg: Config) -> tuple[tuple[str, str], ...]:
    names = ["train_on", "max_tokens", "max_images", "truncation", "min_pixels", "max_pixels"]
    names += [f"video_{name}" for name in CHOSEN]
    return (
        ("model.path", cfg.model.path),
        *((f"data.{name}", str(value)) for name in names if (value := getattr(cfg.data, name))),
    )


def _sources(data: DataSet) -> Iterator[Source]:
    parts = zip(data.sources, data.indexes, data.order.weights, data.order.counts, strict=True)
    for source, index, weight, per_epoch in parts:
        lost = (len(index.faults.dropped), len(index.faults.errors))
        yield source.name, weight, (len(source), len(index), *lost, per_epoch)


def measure_batching(cfg: Config, data: DataSet, ranks: int) -> Batching:
    """Padding and balance of the first epoch's steps, planned as the loader plans them, and as
    plain order would make them with as many rows in each micro-batch."""
    batch_size = cfg.train.global_batch_size
    limits = Limits.of(cfg.train)
    epoch = itertools.islice(data.epoch(Position()), MOST_STEPS * batch_size)
    sizes = [size for _, size, _ in epoch]
    steps = [sizes[start : start + batch_size] for start in range(0, len(sizes), batch_size)]
    planned, naive = [], []
    for sizes in steps:
        planned.append(measure(plan_batch(sizes, ranks, limits), sizes))
        rows = limits.rows
        if limits.tokens is not None:
            rows = max(1, round(len(sizes) / planned[-1].micro_batches))
        naive.append(measure(naive_plan(sizes, ranks, rows), sizes))
    ways = (_way("as planned", planned, steps), _way("in plain order", naive, steps))
    total = math.ceil(len(data.order) / batch_size)
    return Batching(ranks, batch_size, limits, total, len(steps), ways)


def _way(
    name: str, measured: Sequence[Balance], steps: Sequence[Sequence[RowSize]]
) -> BatchingMethod:
    """All steps together: padding over all positions, the other figures as means."""
    real = [sum(size.tokens for size in sizes) for sizes in steps]
    positions = sum(n / (1 - step.padding) for n, step in zip(real, measured, strict=True))
    imbalances = [step.imbalance for step in measured]
    return BatchingMethod(
        name,
        1 - sum(real) / positions,
        sum(imbalances) / len(steps),
        max(imbalances),
        sum(step.micro_batches for step in measured) / len(steps),
    )
