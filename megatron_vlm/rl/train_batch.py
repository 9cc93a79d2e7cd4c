"""Train batch: the segments of the episodes of a step as rows, and their assignment to updates and
replicas.

Rank 0 makes it and sends it to every rank as bytes. Pictures that episodes share are sent once.

Shapes: S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.config.data_sources import name_of_source
from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import ALL_SOURCES, teachers_of
from megatron_vlm.data.batches.balance import Limits, Plan, RowSize, plan_batch
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import DataError
from megatron_vlm.rl.advantages import divisor_of, group_advantages, token_weights
from megatron_vlm.rl.episode import Group, Segment, pictures_of


@dataclass(frozen=True)
class Update:
    """Optimizer step of a train batch."""

    plan: Plan  # [replica][micro-batch][row of the train batch]
    divisor: float | None  # divisor of the summed loss; None: the sum of its token weights
    figures: BatchFigures


@dataclass(frozen=True)
class TrainRow:
    """Segment of an episode to train on, in which every drawn token is supervised."""

    row: Row
    sampler_log_probs_S: Tensor  # log-probs of the drawn tokens; 0 for the other tokens
    advantage: float
    weight: float  # weight of each token's loss
    teacher: int = 0  # place of its teacher among those of teacher.path
    # The scores of a teacher's engine [S, 1 + K, 2]: see Engine.score. None: the ranks score.
    teacher_table: Tensor | None = None

    @property
    def is_drawn_S(self) -> Tensor:
        """True where a token was drawn."""
        return self.row.labels_S != IGNORE


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a step and its updates, the same on every rank."""

    rows: list[TrainRow]
    updates: list[Update]


def groups_of_updates(groups: Sequence[Group], updates: int) -> list[list[Group]]:
    """Return the groups of each update, in the order of their rows in the train batch. Dynamic
    sampling may have left fewer prompts than there are updates."""
    return [list(each) for turn in range(updates) if (each := groups[turn::updates])]


def make_train_batch(
    groups: Sequence[Group], cfg: Config, work: WorkModel, replicas: int
) -> TrainBatch:
    """Build the train batch of these groups. The prompts are divided among the updates."""
    rows: list[TrainRow] = []
    updates = []
    for update_groups in groups_of_updates(groups, cfg.rl.updates):
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
    """Return a row for each segment. An episode counts once, with any number of rows: they have
    its advantage, and its tokens the weights that they would have in one row."""
    rows = []
    for group in groups:
        teacher, episodes = _teacher_of(group, cfg), group.episodes
        weights = token_weights([each.trained for each in episodes], cfg.rl.aggregate)
        advantages = group_advantages(group.rewards, cfg.rl.advantage)
        for episode, advantage, weight in zip(episodes, advantages, weights, strict=True):
            for each in episode.segments:
                rows.append(
                    TrainRow(_row(each), _sampled_log_probs(each), advantage, weight, teacher)
                )
    return rows


def _teacher_of(group: Group, cfg: Config) -> int:
    """Return the place of the teacher of a group's source."""
    names = list(teachers_of(cfg))
    if names in ([], [ALL_SOURCES]):
        return 0
    first = group.episodes[0]
    name = first.record.get("data_source")
    if not isinstance(name, str):
        name = name_of_source(cfg.data.train[group.source].path)
    if name not in names:
        raise DataError(
            f": teacher.path has no teacher for its source {name!r}",
            place=first.where,
            key="data_source",
            found=name,
            allowed=names,
            remedy=f"give teacher.path={{..., {name}: CHECKPOINT}}",
        )
    return names.index(name)


def _row(segment: Segment) -> Row:
    ids_S = torch.tensor(segment.ids)
    drawn_S = torch.tensor([each is not None for each in segment.log_probs])
    labels_S = torch.where(drawn_S, ids_S, IGNORE)
    return Row(ids_S, labels_S, **pictures_of(segment.pictures))


def _sampled_log_probs(segment: Segment) -> Tensor:
    return torch.tensor([0.0 if each is None else each for each in segment.log_probs])


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
    numbers = [[each.advantage, each.weight, each.teacher] for each in train_batch.rows]
    tables = [each.teacher_table for each in train_batch.rows]
    columns["teacher_tables"] = [each for each in tables if each is not None]
    updates = [[each.plan, each.divisor, vars(each.figures)] for each in train_batch.updates]
    meta = {"places": places, "numbers": numbers, "updates": updates}
    return pack({name: (True, rows) for name, rows in columns.items()}, meta)


def train_batch_from_bytes(data: bytes) -> TrainBatch:
    """Deserialize the result of `train_batch_to_bytes`."""
    fields, meta = unpack(data)
    columns = {name: rows for name, (_, rows) in fields.items()}
    tables = columns["teacher_tables"]  # empty if the ranks score
    texts = zip(columns["ids"], columns["labels"], columns["log_probs"], strict=True)
    rows = []
    for number, (ids_S, labels_S, log_probs_S) in enumerate(texts):
        shown: dict[str, Any] = {}
        for name in VISUAL_FIELDS:
            place = meta["places"][name][number]
            shown[name] = None if place < 0 else columns[name][place]
        table = tables[number] if tables else None
        row = Row(ids_S, labels_S, **shown)
        advantage, weight, teacher = meta["numbers"][number]
        rows.append(TrainRow(row, log_probs_S, advantage, weight, teacher, table))
    updates = [
        Update(plan, divisor, BatchFigures(**figures)) for plan, divisor, figures in meta["updates"]
    ]
    return TrainBatch(rows, updates)
