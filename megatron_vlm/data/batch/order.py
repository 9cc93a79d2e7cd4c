"""The order of samples: a function of seed and epoch alone, whoever asks for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Order:
    """Of one or several sources. A source's weight is how often each of its samples comes in an
    epoch: 2.0 twice, 0.5 every other epoch, each time the other half."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    @property
    def counts(self) -> list[int]:
        """Samples that an epoch takes from each source."""
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
        if self.shuffle:
            samples = samples[self._generator(number).permutation(len(samples))]
        return samples

    def _draw(self, source: int, start: int, count: int) -> np.ndarray:
        """Places [start, start + count) of a source's permutations laid end to end."""
        length = self.lengths[source]
        first, last = start // length, (start + count - 1) // length
        rounds = [self._round(source, number) for number in range(first, last + 1)]
        return np.concatenate(rounds)[start - first * length :][:count]

    def _round(self, source: int, number: int) -> np.ndarray:
        length = self.lengths[source]
        if not self.shuffle:
            return np.arange(length)
        return self._generator(source, number).permutation(length)

    def _generator(self, *place: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *place])


def all_of(lengths: Sequence[int]) -> Order:
    """Every sample once, in order: for evaluation."""
    return Order(tuple(lengths), (1.0,) * len(lengths), seed=0, shuffle=False)
