"""The order of samples, which depends on the seed and the epoch alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Order:
    """The order of one or several sources. A source's weight says how often each of its samples
    comes in an epoch: 2.0 is twice; 0.5 is every other epoch, half of them in each."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    @property
    def counts(self) -> list[int]:
        """How many samples an epoch takes from each source."""
        return [
            max(1, round(length * weight)) if length else 0
            for length, weight in zip(self.lengths, self.weights, strict=True)
        ]

    def __len__(self) -> int:
        return sum(self.counts)

    def epoch(self, number: int) -> np.ndarray:
        """The samples [N, 2] of an epoch as (source, index)."""
        parts = [
            np.stack([np.full(count, source), self._draw(source, number * count, count)], axis=1)
            for source, count in enumerate(self.counts)
            if count
        ]
        samples = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
        return samples[self._permutation(len(samples), number)]

    def _draw(self, source: int, start: int, count: int) -> np.ndarray:
        """Places [start, start + count) of a source's permutations, one after the other."""
        length = self.lengths[source]
        first, last = start // length, (start + count - 1) // length
        rounds = [self._permutation(length, source, turn) for turn in range(first, last + 1)]
        return np.concatenate(rounds)[start - first * length :][:count]

    def _permutation(self, length: int, *place: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(length)
        return np.random.default_rng([self.seed, *place]).permutation(length)


def all_of(lengths: Sequence[int]) -> Order:
    """Every sample once, in order, for evaluation."""
    return Order(tuple(lengths), (1.0,) * len(lengths), seed=0, shuffle=False)
