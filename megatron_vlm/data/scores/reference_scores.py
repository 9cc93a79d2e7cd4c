"""Log-probs of answers under a reference model, from a folder that `megatron-vlm score` has written
over the same preferences."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from megatron_vlm.data.scores.score_index import read_complete
from megatron_vlm.data.scores.score_lookup import ScoreLookup
from megatron_vlm.data.tokens.index import Index


class ReferenceScores:
    """The log-probs of a folder."""

    def __init__(self, folder: str, vocabulary: Mapping[str, int]):
        """Open a folder for a model with this vocabulary."""
        index = read_complete("data.reference", folder)
        self.scores = ScoreLookup.open("data.reference", folder, index, vocabulary)

    @cached_property
    def _sums(self) -> list[np.ndarray]:
        """The log-prob of each answer, for each file."""
        return [file.sums() for file in self.scores.files]

    def table(self, index: Index, where: Callable[[int], str]) -> np.ndarray:
        """Return the log-probs of the answers of each sample [samples, answers], and nan where a
        sample has fewer. Refuse a sample without scores, or with those of other tokens. `where`
        names the place of a sample."""
        self.scores.spans(index, where)
        table = np.full((len(index), 2), np.nan)
        for number in range(len(index)):
            for row, sample in enumerate(index.example(number)):
                digest = int(index.digests[number])
                file, place = self.scores.find(digest, sample, where(number))
                table[number, row] = self._sums[file][place]
        return table
