"""Train batch: the episodes of a step as rows, and their assignment to updates and replicas.

Rank 0 makes it and sends it to every rank as bytes. Pictures that episodes share are sent once.

Shapes: S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits, Plan, RowSize, plan_batch
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.rl.advantages import divisor_of, group_advantages, token_weights
from megatron_vlm.rl.episode import Episode, Group, pictures_of


@dataclass(frozen=True)
class Update:
    """Optimizer step of a train batch."""

    plan: Plan  # [replica][micro-batch][row of the train batch]
    divisor: float | None  # divisor of the summed loss; None: the sum of its token weights
    figures: BatchFigures


@dataclass(frozen=True)
class TrainRow:
    """Episode to train on, in which every drawn token is supervised."""

    row: Row
    sampler_log_probs_S: Tensor  # log-probs of the drawn tokens; 0 for the other tokens
    advantage: float
    weight: float  # weight of each token's loss


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a step and its updates, the same on every rank."""

    rows: list[TrainRow]
    updates: list[Update]


def make_train_batch(
    groups: Sequence[Group], cfg: Config, work: WorkModel, replicas: int
) -> TrainBatch:
    """Build the train batch of these groups. The prompts are divided among the updates."""
    rows: list[TrainRow] = []
    updates = []
    for turn in range(cfg.rl.updates):
        if not (update_groups := groups[turn :: cfg.rl.updates]):
            continue  # dynamic sampling has left fewer prompts than there are updates
        first = len(rows)
        rows += _rows(update_groups, cfg)
        lengths = [each.trained for group in update_groups for each in group.episodes]
        sizes = [_size(each.row, work) for each in rows[first:]]
        plan = plan_batch(sizes, replicas, Limits.from_config(cfg.train))
        figures = BatchFigures.from_plan(sizes, plan)
        plan = [[[first + row for row in batch] for batch in share] for share in plan]
        divisor = divisor_of(lengths, cfg.rl.aggregate, cfg.rl.max_new_tokens)
        updates.append(Update(plan, divisor, figures))
    return TrainBatch(rows, updates)


def _rows(groups: Sequence[Group], cfg: Config) -> list[TrainRow]:
    episodes = [each for group in groups for each in group.episodes]
    weights = token_weights([each.trained for each in episodes], cfg.rl.aggregate)
    advantages = [
        each for group in groups for each in group_advantages(group.rewards, cfg.rl.advantage)
    ]
    return [
        TrainRow(_row(episode), _sampled_log_probs(episode), advantage, weight)
        for episode, advantage, weight in zip(episodes, advantages, weights, strict=True)
    ]


def _row(episode: Episode) -> Row:
    ids_S = torch.tensor(episode.ids)
    drawn_S = torch.tensor([each is not None for each in episode.log_probs])
    labels_S = torch.where(drawn_S, ids_S, IGNORE)
    return Row(ids_S, labels_S, **pictures_of(episode.shown))


def _sampled_log_probs(episode: Episode) -> Tensor:
    return torch.tensor([0.0 if each is None else each for each in episode.log_probs])


def _size(row: Row, work: WorkModel) -> RowSize:
    grids = [each for each in (row.image_grid_I3, row.video_grid_I3) if each is not None]
    patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    pairs = sum(int((t * (h * w) ** 2).sum()) for t, h, w in (grid.unbind(-1) for grid in grids))
    supervised = int((row.labels_S != IGNORE).sum())
    images = 0 if row.image_grid_I3 is None else len(row.image_grid_I3)
    return work.row_size(len(row.ids_S), supervised, patches, pairs, images)


def train_batch_to_bytes(train_batch: TrainBatch) -> bytes:
    """Serialize a train batch for `train_batch_from_bytes` on the other ranks."""
    columns: dict[str, list[Tensor]] = {"ids": [], "labels": [], "log_probs": []}
    columns |= {name: [] for name in VISUAL_FIELDS}
    # {field: the place of each row's tensor in the field's column, or -1}
    places: dict[str, list[int]] = {name: [] for name in VISUAL_FIELDS}
    column_places: dict[tuple[str, int], int] = {}
    for train_row in train_batch.rows:
        columns["ids"].append(train_row.row.ids_S)
        columns["labels"].append(train_row.row.labels_S)
        columns["log_probs"].append(train_row.sampler_log_probs_S)
        for name in VISUAL_FIELDS:
            tensor = getattr(train_row.row, name)
            place = -1
            if tensor is not None:
                place = column_places.setdefault((name, id(tensor)), len(columns[name]))
                columns[name] += [tensor] * (place == len(columns[name]))
            places[name].append(place)
    numbers = [[each.advantage, each.weight] for each in train_batch.rows]
    updates = [[each.plan, each.divisor, vars(each.figures)] for each in train_batch.updates]
    meta = {"places": places, "numbers": numbers, "updates": updates}
    return pack({name: (True, rows) for name, rows in columns.items()}, meta)


def train_batch_from_bytes(data: bytes) -> TrainBatch:
    """Deserialize the result of `train_batch_to_bytes`."""
    fields, meta = unpack(data)
    columns = {name: rows for name, (_, rows) in fields.items()}
    texts = zip(columns["ids"], columns["labels"], columns["log_probs"], strict=True)
    rows = []
    for number, (ids_S, labels_S, log_probs_S) in enumerate(texts):
        shown: dict[str, Any] = {}
        for name in VISUAL_FIELDS:
            place = meta["places"][name][number]
            shown[name] = None if place < 0 else columns[name][place]
        advantage, weight = meta["numbers"][number]
        rows.append(TrainRow(Row(ids_S, labels_S, **shown), log_probs_S, advantage, weight))
    updates = [
        Update(plan, divisor, BatchFigures(**figures)) for plan, divisor, figures in meta["updates"]
    ]
    return TrainBatch(rows, updates)
