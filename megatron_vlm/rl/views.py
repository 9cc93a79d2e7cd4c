"""Views of a train row: rows that show its drawn tokens behind another prompt, for models that
score the same tokens.

Shapes: S tokens of a row, N drawn ones, which every view has in the same order.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.rl.train_batch import TrainRow

# The labels of the result are the drawn tokens of the train row, in order.
View = Callable[[TrainRow], Row]


def same(each: TrainRow) -> Row:
    """Return the row as the student sees it."""
    return each.row


def replayed(each: TrainRow) -> Row:
    """Return the row with the experts that the engine chose, as the trained model reads it."""
    return replace(each.row, routing_SLK=each.routing_SLK)


def of_teacher(each: TrainRow) -> Row:
    """Return the row as its teacher sees it, behind what teacher.view shows for its prompt."""
    if (prompt := each.teacher_prompt) is None:
        return each.row
    ids_S = torch.cat([prompt.ids_S, each.row.ids_S[each.prompt_length :]])
    labels_S = torch.cat([prompt.labels_S, each.row.labels_S[each.prompt_length :]])
    return replace(prompt, ids_S=ids_S, labels_S=labels_S)


def is_drawn(row: Row) -> Tensor:
    """Return True where a token of the row was drawn [S]."""
    return row.labels_S != IGNORE


def drawn(scores_S: Tensor, row: Row) -> Tensor:
    """Return the scores of the drawn tokens [N]."""
    return scores_S[is_drawn(row)]


def onto(scores_N: Tensor, row: Row) -> Tensor:
    """Return scores of the drawn tokens at their places in the row, and 0 elsewhere [S]."""
    scores_S = torch.zeros(len(row.ids_S), dtype=scores_N.dtype)
    scores_S[is_drawn(row)] = scores_N
    return scores_S
