"""Order of samples, and those that data.split holds out: the same at each layout and after a
resume. Records with the same content are on the same side. A run has a position in this order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.balance import RowSize
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class Order:
    """The order of samples from one or several sources. A source's weight says how often each of
    its samples comes in an epoch: 2.0 means twice; 0.5 means every other epoch."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    @property
    def counts(self) -> list[int]:
        """Numbers of samples that an epoch takes from each source."""
        return [
            max(1, round(length * weight)) if length else 0
            for length, weight in zip(self.lengths, self.weights, strict=True)
        ]

    def __len__(self) -> int:
        return sum(self.counts)

    def epoch(self, number: int) -> np.ndarray:
        """Return the samples [N, 2] of an epoch as (source, index)."""
        parts = [
            np.stack([np.full(count, source), self._places(source, number * count, count)], axis=1)
            for source, count in enumerate(self.counts)
            if count
        ]
        samples = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
        return samples[self._permutation(len(samples), number)]

    def _places(self, source: int, start: int, count: int) -> np.ndarray:
        """Return the places [start, start + count) in the sequence of a source's permutations."""
        length = self.lengths[source]
        first, last = start // length, (start + count - 1) // length
        rounds = [self._permutation(length, source, turn) for turn in range(first, last + 1)]
        return np.concatenate(rounds)[start - first * length :][:count]

    def _permutation(self, length: int, *place: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(length)
        return np.random.default_rng([self.seed, *place]).permutation(length)


def order_of_all(lengths: Sequence[int]) -> Order:
    """Return the order for evaluation: every sample once, not shuffled."""
    return Order(tuple(lengths), (1.0,) * len(lengths), seed=0, shuffle=False)


def choose_held_out(indexes: Sequence[Index], cfg: DataConfig) -> list[np.ndarray]:
    """Return for each index which of its samples are held out."""
    assert cfg.split is not None
    parts = [_random_numbers(index.digests, cfg.seed) for index in indexes]
    drawn = np.sort(np.concatenate(parts))
    if not len(drawn):
        return parts  # the caller reports that there are no samples
    wanted = cfg.split if cfg.split >= 1 else max(1, round(cfg.split * len(drawn)))
    count = min(int(wanted), len(drawn))
    last = drawn[count - 1]  # samples with the content of this one come along
    if last == drawn[-1]:
        raise DataError(
            f"leaves no record of the {len(drawn):,} to train on",
            key="data.split",
            found=cfg.split,
            remedy="hold out fewer, or name held-out records in data.eval",
        )
    return [part <= last for part in parts]


def _random_numbers(digests: np.ndarray, seed: int) -> np.ndarray:
    """Return a random number for each digest and this seed, by the mixer of SplitMix64."""
    mixed = digests.view(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Position:
    """The position of a run in its data: everything that a checkpoint needs to know about it."""

    epoch: int = 0
    taken: int = 0  # samples taken from this epoch
    stream: dict[str, Any] | None = None  # position in a stream


class SampleSource(Protocol):
    """A set of samples as the loader sees it: a DataSet or a StreamSet. If its samples are
    `known_ahead`, `epoch` reads nothing, and another process may iterate over it."""

    @property
    def known_ahead(self) -> bool: ...
    def epoch(self, start: Position) -> Iterator[tuple[Any, RowSize, Position]]: ...
    @property
    def reader(self) -> Reader: ...
    def rows(self, handle: Any) -> list[Row]: ...
    def example(self, handle: Any) -> Example: ...
    def reference(self, handle: Any) -> list[float] | None: ...
    def faults(self) -> tuple[Counter[str], list[str]]: ...
