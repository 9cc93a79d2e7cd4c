"""Scores of rows from a forward pass: log-probs of their supervised tokens, the most likely tokens,
the experts of each token, and the targets of a student that learns from this model.

All ranks of a replica get the same. Replicas that share experts call these functions together, also
without batches.

Shapes: S tokens of a row, N supervised ones, M their targets, J the most likely tokens of each, R
these and all others, L decoder layers with experts, K experts of a token, or the token itself and
the most likely ones, 2 an id and its log-prob.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch, RowPlace
from megatron_vlm.model.head import log_probs_head, score_head, top_events_head, top_tokens_head
from megatron_vlm.training.expert_routing import routing_tables
from megatron_vlm.training.pipeline import Stage, pass_through
from megatron_vlm.training.stage_inputs import StageInput

OfRow = TypeVar("OfRow")

# An engine gives the most likely tokens alone, in fp32. All others have what is left of 1, and a
# smaller rest than this cannot be told from nothing.
SMALLEST_REST = 2.0**-24


def score_rows(stage: Stage, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
    """Return the log-probs of each row, as `MegatronWorker.forward` describes them."""
    scored = score_targets(stage, batches, temperature)
    return rows_by_place(batches, map(MicroBatch.log_probs_by_row, batches, scored))


def score_targets(
    stage: Stage, batches: Sequence[MicroBatch], temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Return the log-probs of each micro-batch's targets [M], fp32 on the host."""
    outputs = stage.evaluate(batches, partial(log_probs_head, temperature=temperature))
    return gather_targets(stage, batches, [each.log_probs_M for each in outputs])


def gather_targets(
    stage: Stage, batches: Sequence[MicroBatch], outputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Send the last stage's values of each micro-batch's targets [M] to the host of every rank."""
    counts = [batch.num_supervised for batch in batches]
    return stage.share_last(outputs, counts, torch.empty(0))


def row_rewards(stage: Stage, batches: Sequence[MicroBatch]) -> list[float]:
    """Return the reward of each row, by the scalar head at its last token."""
    outputs = stage.evaluate(batches, score_head)
    rewards = gather_targets(stage, batches, [each.scores_N for each in outputs])
    return rows_by_place(batches, (each.tolist() for each in rewards))


def top_tokens(
    stage: Stage, batches: Sequence[MicroBatch], count: int, temperature: float
) -> list[Tensor]:
    """Return the most likely tokens of each row, as the worker describes them."""
    outputs = stage.evaluate(
        batches, partial(top_tokens_head, count=count, temperature=temperature)
    )
    sizes = [len(batch.supervised[0]) for batch in batches]
    like_NJ = torch.empty(0, count, dtype=torch.double)
    ids = stage.share_last([each.top_ids_NJ for each in outputs], sizes, like_NJ.long())
    log_probs = stage.share_last([each.top_log_probs_NJ for each in outputs], sizes, like_NJ)

    def rows(batch: MicroBatch, ids_NJ: Tensor, log_probs_NJ: Tensor) -> list[Tensor]:
        spread = like_NJ.new_zeros(*batch.tokens_BS5.shape[:2], count, 2)
        spread[batch.supervised] = torch.stack([ids_NJ.double(), log_probs_NJ], dim=-1)
        return [row[:length].clone() for row, length in zip(spread, batch.lengths, strict=True)]

    return rows_by_place(batches, map(rows, batches, ids, log_probs))


def routing(stage: Stage, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the experts [S, L, K] of each token of each row."""
    inputs: list[StageInput] = []

    def keep(batch: StageInput) -> Any:
        inputs.append(batch)
        return pass_through

    stage.evaluate(batches, read=keep)
    chosen = [(item.number, item.routing.chosen) for item in inputs if item.routing is not None]
    tables = routing_tables(batches, chosen, stage.sizes.text, stage.grid, stage.device)
    by_row = [
        table_TLK.split(list(batch.lengths))
        for batch, table_TLK in zip(batches, tables, strict=True)
    ]
    return rows_by_place(batches, by_row)


@dataclass(frozen=True)
class RowScores:
    """Scores of a row's supervised tokens by a model, in order."""

    label_log_probs_N: Tensor  # float32, at temperature 1
    ids_NJ: Tensor  # int32, the most likely tokens in falling order; J may be 0
    log_probs_NR: Tensor  # float32, of these tokens and of all others, at a temperature

    @staticmethod
    def uniform(length: int, count: int) -> "RowScores":
        """Return scores in which all of `count` tokens, and all others together, are alike."""
        log_probs_NR = torch.full((length, count + 1), -math.log(count + 1))
        ids_NJ = torch.arange(count, dtype=torch.int).expand(length, count)
        return RowScores(log_probs_NR[:, 0], ids_NJ, log_probs_NR)

    @staticmethod
    def from_table(table_SK2: Tensor, positions_N: Tensor) -> "RowScores":
        """Return the scores of the supervised tokens from an engine's table of a row, which has
        the token itself and then the most likely ones at the position that predicts it."""
        at_NK2 = table_SK2[positions_N.long() - 1]
        ids_NJ, log_probs_NJ = at_NK2[:, 1:].unbind(-1)
        rest_N1 = (1 - log_probs_NJ.exp().sum(dim=1, keepdim=True)).clamp(min=SMALLEST_REST)
        log_probs_NR = torch.cat([log_probs_NJ, rest_N1.log()], dim=1)
        return RowScores(at_NK2[:, 0, 1].float(), ids_NJ.int(), log_probs_NR.float())


def top_targets(
    stage: Stage, batches: Sequence[MicroBatch], count: int, temperature: float
) -> list[RowScores]:
    """Return the scores of each row of the batches, with `count` tokens, on the host."""
    top_events = partial(top_events_head, count=count, temperature=temperature)
    outputs = stage.evaluate(batches, top_events if count else log_probs_head)
    sizes = [len(batch.supervised[0]) for batch in batches]
    like = torch.empty(0, count + 1)
    labels = stage.share_last([each.log_probs_M for each in outputs], sizes, like[:, 0])
    if count:
        ids = stage.share_last([each.top_ids_NJ for each in outputs], sizes, like[:, :-1].int())
        events = stage.share_last([each.events_NR for each in outputs], sizes, like)
    else:
        ids = events = tuple(torch.empty(size, 0) for size in sizes)

    def rows(batch: MicroBatch, *columns: Tensor) -> list[RowScores]:
        counts = torch.bincount(batch.supervised[0], minlength=len(batch.lengths)).tolist()
        split = zip(*(column.split(counts) for column in columns), strict=True)
        return [
            RowScores(label_N, ids_NJ.int(), log_probs_NR)
            for label_N, ids_NJ, log_probs_NR in split
        ]

    return rows_by_place(batches, map(rows, batches, labels, ids, events))


def rows_by_place(batches: Sequence[MicroBatch], rows: Iterable[Sequence[OfRow]]) -> list[OfRow]:
    """Return the rows of micro-batches in the order of the batch that they were cut from."""
    row_at = {
        place: row
        for batch, batch_rows in zip(batches, rows, strict=True)
        for place, row in zip(batch.rows, batch_rows, strict=False)  # a filler's row has no place
    }
    return [row_at[place] for place in sorted(row_at)]


def values_by_place(
    batches: Sequence[MicroBatch], values: Iterable[OfRow]
) -> dict[RowPlace, OfRow]:
    """Return what was computed of each row, by the row's place in the batch that the micro-batches
    were cut from. `values` are in the order of these places."""
    places = sorted(place for batch in batches for place in batch.rows)
    return dict(zip(places, values, strict=True))
