"""Scores of a folder that `megatron-vlm score` has written, found by record: by the digests of its
content and of its samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_vlm.data.scores.score_file import ScoreFile, digest_sample
from megatron_vlm.data.scores.score_index import ScoreIndex, digest_vocabulary
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import home_path

_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
OTHER_SAMPLE = (
    "score it again with the settings of data.* that training has: the template, the limits, and "
    "what data.train_on supervises decide the tokens"
)


@dataclass(frozen=True)
class ScoreLookup:
    """The scores of a folder. `places` [scores, 2] are sorted by digest."""

    key: str  # key of the configuration that names the folder
    folder: str
    index: ScoreIndex
    files: tuple[ScoreFile, ...]
    digests: np.ndarray  # digests of the records of all scores, in rising order
    places: np.ndarray  # [scores, 2]: the file of each score, and its place there

    @staticmethod
    def open(
        key: str, folder: str, index: ScoreIndex, vocabulary: Mapping[str, int]
    ) -> "ScoreLookup":
        """Open a folder with this index, for a model with this vocabulary."""
        if index.vocabulary != digest_vocabulary(vocabulary):
            raise DataError(
                "was scored with another tokenizer: its tokens have other ids than those of "
                "model.path",
                key=key,
                found=folder,
                remedy="score the data with a model of the same family, and with the same "
                "data.add_tokens",
            )
        files = tuple(ScoreFile.open(home_path(folder) / name) for name in index.files)
        for file in files:
            if file.top_k != index.top_k:
                raise DataError(
                    f"stores {file.top_k} tokens of each place, and scores.json says {index.top_k}",
                    place=str(file.path),
                    key=key,
                    found=folder,
                    remedy="score the data again in a new folder",
                )
        digests = np.concatenate([file.columns["digests"] for file in files])
        counts = [len(file) for file in files]
        numbers = np.repeat(np.arange(len(files)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(digests, kind="stable")
        pairs = np.stack([numbers, places], axis=1)[order]
        return ScoreLookup(key, folder, index, files, digests[order], pairs)

    def spans(self, index: Index, where: Callable[[int], str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first place of each sample's scores, and the place after the last one. Refuse
        the first sample without scores. `where` names the place of a sample."""
        first, last = (np.searchsorted(self.digests, index.digests, side) for side in _SIDES)
        if len(missing := np.flatnonzero(first == last)):
            raise self.error(
                f"has no scores of {len(missing):,} of {len(index):,} samples; the first is "
                f"{where(int(missing[0]))}",
                "score these records, too: megatron-vlm score scores data.train and data.eval",
            )
        return first, last

    def find(self, digest: int, sample: Sample, where: str) -> tuple[int, int]:
        """Return the file, and the place there, of the score of the record with this digest and of
        these tokens."""
        first, last = (int(np.searchsorted(self.digests, digest, side)) for side in _SIDES)
        wanted = digest_sample(sample)
        for number, place in self.places[first:last].tolist():
            if self.files[number].columns["sample_digests"][place] == wanted:
                return number, place
        problem = "other tokens of" if last > first else "no scores of"
        raise self.error(f"has {problem} {where}", OTHER_SAMPLE)

    def error(self, problem: str, remedy: str) -> DataError:
        """Return an error about the folder."""
        return DataError(problem, key=self.key, found=self.folder, remedy=remedy)
