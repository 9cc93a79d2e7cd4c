"""Targets of a teacher, from a folder that `megatron-vlm score` has written. Each sample finds its
own by digest, and gets none but its own.

Shapes: N supervised tokens of a sample, J the teacher's most likely tokens of each, R the J + 1
events: these tokens, and all others together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.scores.score_file import RecordScore, ScoreFile, digest_sample
from megatron_vlm.data.scores.score_index import check_scores, digest_vocabulary
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import home_path

_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_OTHER_SAMPLE = (
    "score it again with the settings of data.* that training has: the template, the limits, and "
    "what data.train_on supervises decide the tokens"
)


@dataclass(frozen=True)
class TeacherTargets:
    """The targets of a folder. `places` [records] are sorted by digest."""

    folder: str
    digest: str  # digest of what the scores were computed from
    top_k: int  # tokens that a sample gets of those that are stored
    files: tuple[ScoreFile, ...]
    digests: np.ndarray  # those of all records, in rising order
    places: np.ndarray  # [records, 2]: the file of each digest, and its place there

    @staticmethod
    def open(folder: str, top_k: int | None, vocabulary: Mapping[str, int]) -> "TeacherTargets":
        """Open a folder for a student with this vocabulary. With `top_k` samples get that many
        tokens of a place."""
        index = check_scores(folder, top_k)
        if index.vocabulary != digest_vocabulary(vocabulary):
            raise DataError(
                "was scored with another tokenizer: its tokens have other ids than those of "
                "model.path",
                key="data.teacher",
                found=folder,
                remedy="give a teacher and a student of one family, with the same data.add_tokens",
            )
        files = tuple(ScoreFile.open(home_path(folder) / name) for name in index.files)
        digests = np.concatenate([file.columns["digests"] for file in files])
        counts = [len(file) for file in files]
        numbers = np.repeat(np.arange(len(files)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(digests, kind="stable")
        pairs = np.stack([numbers, places], axis=1)[order]
        wanted = index.top_k if top_k is None else top_k
        return TeacherTargets(folder, index.digest, wanted, files, digests[order], pairs)

    def check(self, index: Index, where: Callable[[int], str]) -> None:
        """Refuse the first sample of an index that has no targets, or those of another length.
        `where` names the place of a sample."""
        first, last = (np.searchsorted(self.digests, index.digests, side) for side in _SIDES)
        if len(missing := np.flatnonzero(first == last)):
            raise self._error(
                f"has no scores of {len(missing):,} of {len(index):,} samples; the first is "
                f"{where(int(missing[0]))}",
                "score these records, too: megatron-vlm score scores data.train and data.eval",
            )
        tokens, counts = (
            np.concatenate([getter(file) for file in self.files])[self._flat()]
            for getter in (lambda file: file.columns["tokens"], lambda file: file.counts)
        )
        # A digest may occur several times. Only the sample's own tokens tell these apart.
        is_other = (last - first == 1) & (
            (tokens[first] != index.tokens) | (counts[first] != index.supervised)
        )
        if len(wrong := np.flatnonzero(is_other)):
            place = int(wrong[0])
            at = first[place]
            raise self._error(
                f"has scores of other tokens of {len(wrong):,} of {len(index):,} samples; the "
                f"first is {where(place)}, which has {int(index.tokens[place])} tokens and "
                f"{int(index.supervised[place])} supervised ones, and was scored with "
                f"{int(tokens[at])} and {int(counts[at])}",
                _OTHER_SAMPLE,
            )

    def taught(self, row: Row, sample: Sample, where: str, digest: int) -> Row:
        """Return the row of a sample with its targets."""
        record = self._find(digest, sample, where)
        assert record.top_ids_NJ is not None and record.top_log_probs_NR is not None
        ids_NJ = torch.from_numpy(record.top_ids_NJ)
        log_probs_NR = torch.from_numpy(record.top_log_probs_NR)
        return replace(
            row,
            teacher_ids_NJ=ids_NJ[:, : self.top_k],
            teacher_log_probs_NR=lump_tail(log_probs_NR, self.top_k),
        )

    def _find(self, digest: int, sample: Sample, where: str) -> RecordScore:
        """Return the score of the record with this digest and these tokens."""
        first, last = (int(np.searchsorted(self.digests, digest, side)) for side in _SIDES)
        wanted = digest_sample(sample)
        for number, place in self.places[first:last]:
            if self.files[number].columns["sample_digests"][place] == wanted:
                return self.files[number].record(int(place))
        problem = "other tokens of" if last > first else "no scores of"
        raise self._error(f"has {problem} {where}", _OTHER_SAMPLE)

    def _flat(self) -> np.ndarray:
        """Return the number of each record among those of all files, in the order of digests."""
        starts = np.cumsum([0, *map(len, self.files)])[:-1]
        flat: np.ndarray = starts[self.places[:, 0]] + self.places[:, 1]
        return flat

    def _error(self, problem: str, remedy: str) -> DataError:
        return DataError(problem, key="data.teacher", found=self.folder, remedy=remedy)


def lump_tail(log_probs_NR: Tensor, top_k: int) -> Tensor:
    """Return the log-probs of the first `top_k` tokens, and of all others together."""
    others_N = log_probs_NR[:, top_k:].double().logsumexp(dim=1)
    return torch.cat([log_probs_NR[:, :top_k], others_N.to(log_probs_NR.dtype)[:, None]], dim=1)
