"""Scores of a teacher for the tokens of a row.

Shapes: S tokens of a row, N its drawn tokens, J most likely tokens of the teacher, R these and all
others, K the row's own token and these, 2 an id and its log-prob.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import DataError
from megatron_vlm.rl.train_batch import TrainBatch, TrainRow
from megatron_vlm.training.row_scores import TopTargets


@dataclass(frozen=True)
class TeacherScores:
    """Log-probs under the teacher: of each drawn token, at that token, and with rl.teacher_top_k of
    the teacher's most likely tokens and of all others together, for each drawn token in order."""

    log_probs_S: Tensor
    ids_NJ: Tensor | None = None
    log_probs_NR: Tensor | None = None

    @staticmethod
    def from_targets(targets: TopTargets, row: Row) -> "TeacherScores":
        """Return the scores of a row by a teacher of the ranks."""
        is_drawn_S = row.labels_S != IGNORE
        log_probs_S = torch.zeros(len(is_drawn_S))
        log_probs_S[is_drawn_S] = targets.label_log_probs_N
        return TeacherScores(log_probs_S, targets.ids_NJ, targets.log_probs_NR)

    @staticmethod
    def from_table(table_SK2: Tensor, row: Row) -> "TeacherScores":
        """Return the scores of a row from an engine's table, which has the row's own token first at
        each position, at the position that predicts it."""
        drawn_N = (row.labels_S != IGNORE).nonzero()[:, 0]
        scores = TeacherScores.from_targets(TopTargets.from_table(table_SK2, drawn_N), row)
        return scores if table_SK2.shape[1] > 1 else TeacherScores(scores.log_probs_S)


def check_ids_of_teacher(train_batch: TrainBatch, place: int, vocab: int, path: str) -> None:
    """Refuse drawn ids that this teacher has no row for. Ranks that have the whole train batch all
    raise this error together."""
    for train_row in train_batch.rows:
        if train_row.teacher == place and int(train_row.row.ids_S.max()) >= vocab:
            raise DataError(
                f": the student has drawn it, and the vocabulary of the teacher {path} has "
                f"{vocab} rows; no text has this token, so the student draws at random",
                place="an answer",
                key="tokens",
                found=int(train_row.row.ids_S.max()),
                allowed=range(vocab),
                remedy="train the student on text first, or give a teacher with as many rows",
            )


def mean_teacher_kls(
    rows: Mapping[int, TrainRow],
    student: Mapping[int, Tensor],
    teacher: Mapping[int, TeacherScores],
    grid: RankGroups,
    device: torch.device,
) -> dict[int, float]:
    """Return the mean of student minus teacher log-prob over the drawn tokens of each row of the
    train batch: an estimate of the reverse KL for each token, which may be below 0. A
    collective."""
    local = {}
    for number, scores in teacher.items() if grid.leads else ():
        is_drawn_S = rows[number].row.labels_S != IGNORE
        gap_N = (student[number] - scores.log_probs_S)[is_drawn_S]
        local[str(number)] = float(gap_N.double().mean())
    gathered = all_gather_json(local, None, device)
    return dict(sorted((int(number), kl) for each in gathered for number, kl in each.items()))
