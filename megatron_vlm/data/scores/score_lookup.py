"""Scores of a folder that `megatron-vlm score` has written, found by record: by the digests of its
content and of its samples. They are a reference's log-probs or a teacher's targets.

Shapes: N supervised tokens of a sample, J the teacher's most likely tokens of each, R the J + 1
events: these tokens, and all others together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.scores import score_index
from megatron_vlm.data.scores.score_file import ScoreFile, digest_sample
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.row import Row
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
    index: score_index.ScoreIndex
    files: tuple[ScoreFile, ...]
    digests: np.ndarray  # digests of the records of all scores, in rising order
    places: np.ndarray  # [scores, 2]: the file of each score, and its place there

    @staticmethod
    def open(
        key: str, folder: str, index: score_index.ScoreIndex, vocabulary: Mapping[str, int]
    ) -> "ScoreLookup":
        """Open a folder with this index, for a model with this vocabulary."""
        if index.vocabulary != score_index.digest_vocabulary(vocabulary):
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
        """Return the file of the record with this digest and these tokens, and the place there."""
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


class ReferenceScores:
    """The log-probs of a folder."""

    def __init__(self, folder: str, vocabulary: Mapping[str, int]):
        """Open a folder for a model with this vocabulary."""
        key = "preference.reference"
        self.scores = ScoreLookup.open(
            key, folder, score_index.read_complete(key, folder), vocabulary
        )
        self.sums = [file.sums() for file in self.scores.files]  # log-prob of each answer

    def table(self, index: Index, where: Callable[[int], str]) -> np.ndarray:
        """Return the log-probs of the answers of each sample [samples, answers], and nan where a
        sample has fewer. Refuse a sample without scores, or with scores of other tokens. `where`
        names the place of a sample."""
        self.scores.spans(index, where)
        table = np.full((len(index), 2), np.nan)
        for number in range(len(index)):
            for row, sample in enumerate(index.example(number)):
                digest = int(index.digests[number])
                file, place = self.scores.find(digest, sample, where(number))
                table[number, row] = self.sums[file][place]
        return table


@dataclass(frozen=True)
class TeacherTargets:
    """The targets of a folder."""

    scores: ScoreLookup
    top_k: int  # tokens that a sample gets of those that are stored

    @staticmethod
    def open(folder: str, top_k: int | None, vocabulary: Mapping[str, int]) -> "TeacherTargets":
        """Open a folder for a student with this vocabulary, and `top_k` tokens of each place."""
        index = score_index.check_scores(folder, top_k)
        scores = ScoreLookup.open("teacher.path", folder, index, vocabulary)
        return TeacherTargets(scores, index.top_k if top_k is None else top_k)

    def check(self, index: Index, where: Callable[[int], str]) -> None:
        """Refuse the first sample of an index without targets, or with targets of another length.
        `where` names the place of a sample."""
        first, last = self.scores.spans(index, where)
        starts = np.cumsum([0, *map(len, self.scores.files)])[:-1]
        by_digest = starts[self.scores.places[:, 0]] + self.scores.places[:, 1]
        tokens, counts = (
            np.concatenate([getter(file) for file in self.scores.files])[by_digest]
            for getter in (lambda file: file.columns["tokens"], lambda file: file.counts)
        )
        # A digest may occur several times. Only the sample's own tokens tell these apart.
        is_other = (last - first == 1) & (
            (tokens[first] != index.tokens) | (counts[first] != index.supervised)
        )
        if len(wrong := np.flatnonzero(is_other)):
            place = int(wrong[0])
            at = first[place]
            raise self.scores.error(
                f"has scores of other tokens of {len(wrong):,} of {len(index):,} samples; the "
                f"first is {where(place)}, which has {int(index.tokens[place])} tokens and "
                f"{int(index.supervised[place])} supervised ones, and was scored with "
                f"{int(tokens[at])} and {int(counts[at])}",
                OTHER_SAMPLE,
            )

    def taught(self, row: Row, sample: Sample, where: str, digest: int) -> Row:
        """Return the row of a sample with its targets."""
        number, place = self.scores.find(digest, sample, where)
        record = self.scores.files[number].record(place)
        assert record.top_ids_NJ is not None and record.top_log_probs_NR is not None
        ids_NJ = torch.from_numpy(record.top_ids_NJ)
        log_probs_NR = torch.from_numpy(record.top_log_probs_NR)
        return replace(
            row,
            teacher_ids_NJ=ids_NJ[:, : self.top_k],
            teacher_log_probs_NR=lump_tail(log_probs_NR, self.top_k),
        )


def lump_tail(log_probs_NR: Tensor, top_k: int) -> Tensor:
    """Return the log-probs of the first `top_k` tokens, and of all others together."""
    others_N = log_probs_NR[:, top_k:].double().logsumexp(dim=1)
    return torch.cat([log_probs_NR[:, :top_k], others_N.to(log_probs_NR.dtype)[:, None]], dim=1)
