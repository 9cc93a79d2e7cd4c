"""Targets of a teacher, from a folder that `megatron-vlm score` has written. Each sample finds its
own by digest, and gets none but its own.

Shapes: N supervised tokens of a sample, J the teacher's most likely tokens of each, R the J + 1
events: these tokens, and all others together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.scores.score_index import check_scores
from megatron_vlm.data.scores.score_lookup import OTHER_SAMPLE, ScoreLookup
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Sample


@dataclass(frozen=True)
class TeacherTargets:
    """The targets of a folder."""

    scores: ScoreLookup
    top_k: int  # tokens that a sample gets of those that are stored

    @staticmethod
    def open(folder: str, top_k: int | None, vocabulary: Mapping[str, int]) -> "TeacherTargets":
        """Open a folder for a student with this vocabulary. With `top_k` samples get that many
        tokens of a place."""
        index = check_scores(folder, top_k)
        scores = ScoreLookup.open("data.teacher", folder, index, vocabulary)
        return TeacherTargets(scores, index.top_k if top_k is None else top_k)

    def check(self, index: Index, where: Callable[[int], str]) -> None:
        """Refuse the first sample of an index that has no targets, or those of another length.
        `where` names the place of a sample."""
        first, last = self.scores.spans(index, where)
        tokens, counts = (
            np.concatenate([getter(file) for file in self.scores.files])[self._flat()]
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

    def _flat(self) -> np.ndarray:
        """Return the number of each record among those of all files, in the order of digests."""
        starts = np.cumsum([0, *map(len, self.scores.files)])[:-1]
        places = self.scores.places
        flat: np.ndarray = starts[places[:, 0]] + places[:, 1]
        return flat


def lump_tail(log_probs_NR: Tensor, top_k: int) -> Tensor:
    """Return the log-probs of the first `top_k` tokens, and of all others together."""
    others_N = log_probs_NR[:, top_k:].double().logsumexp(dim=1)
    return torch.cat([log_probs_NR[:, :top_k], others_N.to(log_probs_NR.dtype)[:, None]], dim=1)
