"""Scores of the supervised tokens of rows: the log-probs of the tokens themselves, and the targets
of a student that learns from this model.

Shapes: S tokens of a row, N supervised ones, J the most likely tokens of each, R these and all
others, K the token itself and the most likely ones, 2 an id and its log-prob.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.training.pipeline import Stage, pass_through, rows_by_place
from megatron_vlm.training.stage_inputs import StageInput

# An engine gives the most likely tokens alone, in fp32. All others have what is left of 1, and a
# smaller rest than this cannot be told from nothing.
SMALLEST_REST = 2.0**-24


@dataclass(frozen=True)
class TopTargets:
    """A model's view of a row's supervised tokens, in order."""

    label_log_probs_N: Tensor  # float32, at temperature 1
    ids_NJ: Tensor  # int32, the most likely tokens in falling order; J may be 0
    log_probs_NR: Tensor  # float32, of these tokens and of all others, at a temperature

    @staticmethod
    def from_table(table_SK2: Tensor, positions_N: Tensor) -> "TopTargets":
        """Return the targets of the supervised tokens from an engine's scores of a row, which have
        the token itself and then the most likely ones at the position that predicts it."""
        at_NK2 = table_SK2[positions_N.long() - 1]
        ids_NJ, log_probs_NJ = at_NK2[:, 1:].unbind(-1)
        rest_N1 = (1 - log_probs_NJ.exp().sum(dim=1, keepdim=True)).clamp(min=SMALLEST_REST)
        log_probs_NR = torch.cat([log_probs_NJ, rest_N1.log()], dim=1)
        return TopTargets(at_NK2[:, 0, 1].float(), ids_NJ.int(), log_probs_NR.float())


def top_targets(
    stage: Stage, batches: Sequence[MicroBatch], count: int, temperature: float
) -> list[TopTargets]:
    """Return the targets of each row of the batches, with `count` tokens, on the host of every rank
    of the replica. Replicas that share experts call it together; a replica that has nothing to
    score passes no batches."""

    def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        if not count:
            return stage.predict(chunk, batch), _as_column
        heads = {"labels": batch.targets_M, "loss_mask": batch.places_N}
        return stage.call(chunk, batch, **heads, likeliest=(count, temperature)), pass_through

    with stage.evaluating():
        outputs = stage.run(batches, step, forward_only=True)
    widths = [count, 1, count + 1] if count else [0, 1, 0]
    sizes = [len(batch.supervised[0]) for batch in batches]
    pieces = stage.share_last(outputs, sizes, torch.empty(0, sum(widths), dtype=torch.double))

    def rows(batch: MicroBatch, piece: Tensor) -> list[TopTargets]:
        counts = torch.bincount(batch.supervised[0], minlength=len(batch.lengths))
        split = (part.split(widths, dim=1) for part in piece.split(counts.tolist()))
        return [
            TopTargets(label_N1[:, 0].float(), ids_NJ.int(), log_probs_NR.float())
            for ids_NJ, label_N1, log_probs_NR in split
        ]

    return rows_by_place(batches, map(rows, batches, pieces))


def _as_column(output: Tensor, non_loss_data: bool = True) -> Tensor:
    """Return the last stage's log-probs [N] as [N, 1], for Megatron's forward-only schedules."""
    assert non_loss_data
    return output[:, None]
