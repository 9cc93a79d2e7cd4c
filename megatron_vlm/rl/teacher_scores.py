"""Scores of a teacher for the tokens of a row, and the row that learns from its most likely tokens.

Shapes: S tokens of a row, K most likely tokens of the teacher, J = 1 + K targets of a position,
2 an id and its log-prob.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import DataError
from megatron_vlm.rl.train_batch import TrainBatch, TrainRow


@dataclass(frozen=True)
class TeacherScores:
    """Log-probs under the teacher: of each drawn token, at that token, and of the teacher's most
    likely tokens, at the position that predicts them; None without rl.teacher_top_k."""

    log_probs_S: Tensor
    top_SK2: Tensor | None = None

    @staticmethod
    def from_table(table_SJ2: Tensor) -> "TeacherScores":
        """Return the scores from a table that has the drawn token first at each position."""
        log_probs_S = _at_own_token(table_SJ2[:, 0, 1].float())
        return TeacherScores(log_probs_S, table_SJ2[:, 1:] if table_SJ2.shape[1] > 1 else None)


def row_with_targets(
    row: Row, values_S: Mapping[str, Tensor], weight: float, scores: TeacherScores
) -> Row:
    """Return a row whose positions have the drawn token and the teacher's tokens as targets, with
    the values of `with_lumped_kl`. `values_S` and the labels are at their own tokens."""
    assert scores.top_SK2 is not None
    next_S = _at_predicting_position(row.labels_S, IGNORE)
    is_drawn_S1 = (next_S != IGNORE)[:, None]
    ids_SJ = torch.cat([next_S[:, None], scores.top_SK2[..., 0].long()], dim=1)
    columns = {name: _at_predicting_position(value, 0) for name, value in values_S.items()}
    columns["token_weights"] = torch.full_like(scores.log_probs_S, weight)
    values = {}
    for name, column_S in columns.items():
        values[name] = torch.zeros(ids_SJ.shape)
        values[name][:, 0] = column_S
    values["teacher_log_probs"] = torch.zeros(ids_SJ.shape)
    values["teacher_log_probs"][:, 1:] = scores.top_SK2[..., 1]
    return replace(
        row,
        labels_S=torch.full_like(row.labels_S, IGNORE),
        targets=ids_SJ.where(is_drawn_S1, IGNORE),
        values_S=values,
    )


def _at_own_token(predicted_S: Tensor) -> Tensor:
    return torch.cat([predicted_S.new_zeros(1), predicted_S[:-1]])


def _at_predicting_position(own_S: Tensor, last: float) -> Tensor:
    return torch.cat([own_S[1:], own_S.new_full((1,), last)])


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
