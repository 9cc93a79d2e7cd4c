"""Train batch: the segments of the episodes of a step as rows, with their advantages, token weights
and divisor, and their assignment to updates and replicas. docs/rl.md lists the settings of each
algorithm. A view shows the drawn tokens of a row behind another prompt, for a model that scores
them.

Rank 0 makes it and sends it to every rank as bytes. Pictures that episodes share are sent once.

Shapes: K the most likely tokens, S tokens of a row, N drawn ones, which every view has in the same
order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from megatron_vlm.config.data_sources import name_of_source
from megatron_vlm.config.schema import Advantage, Config
from megatron_vlm.config.teachers import ALL_SOURCES, teachers_of
from megatron_vlm.data.batches.balance import (
    Limits,
    Plan,
    RowSize,
    VisualSize,
    WorkModel,
    plan_batch,
)
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of, rows_of
from megatron_vlm.data.tensors.tensor_list import TensorList, pack, unpack
from megatron_vlm.data.tokens.row import (
    GRID_OF,
    IGNORE,
    VISUAL_FIELDS,
    Row,
    join_parts,
    parts_of,
    prompt_row,
)
from megatron_vlm.errors import DataError
from megatron_vlm.rl.episode import Episode, Group, Segment

Aggregate = Literal["tokens", "sequences", "constant"]

STD_FLOOR = 1e-4  # added to a group's standard deviation, as in TRL


def group_advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """Return the advantages of the answers to a prompt. grpo subtracts the mean and divides by the
    sample standard deviation, rloo subtracts the mean of the other answers, and dr_grpo subtracts
    the mean. All are zero where all rewards are equal, and with none."""
    assert rewards and all(map(math.isfinite, rewards)), rewards
    assert kind != "rloo" or len(rewards) > 1, "rloo compares an answer with others"
    if kind == "none" or min(rewards) == max(rewards):
        # Exact zeros: the sums would leave a rounding error.
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    over = [reward - mean for reward in rewards]
    if kind == "dr_grpo":
        return over
    if kind == "rloo":  # r - (sum - r) / (count - 1)
        return [each * count / (count - 1) for each in over]
    if kind == "grpo":
        std = math.sqrt(math.fsum(each * each for each in over) / (count - 1))
        return [each / (std + STD_FLOOR) for each in over]
    assert_never(kind)


def token_weights(lengths: Sequence[int], aggregate: Aggregate) -> list[float]:
    """Return the token weight of each answer, given its number of supervised tokens. With
    "sequences" all answers have the same total weight, otherwise all tokens have the same
    weight."""
    if aggregate == "sequences":
        return [1 / max(length, 1) for length in lengths]
    return [1.0] * len(lengths)


def divisor_of(lengths: Sequence[int], aggregate: Aggregate, max_tokens: int) -> float | None:
    """Return the divisor of the weighted sum over all answers of a step. None means the sum of the
    weights, which is the number of tokens, or of answers that have tokens. "constant" is the
    divisor of Dr. GRPO, which does not depend on the lengths of the answers."""
    if aggregate == "constant":
        return float(len(lengths) * max_tokens)
    return None


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
    sampler_log_probs_N: Tensor  # log-probs of the drawn tokens, in order
    advantage: float
    weight: float  # weight of each token's loss
    teacher: int = 0  # place of its teacher in teacher.path; -1: none
    # The scores of a teacher's engine [S, 1 + K, 2]: see Engine.score. None: the ranks score.
    teacher_table: Tensor | None = None
    prompt_length: int = 0  # tokens of the row's prompt
    teacher_prompt: Row | None = None  # what teacher.view shows for it, with the later pictures
    episode: int = 0  # number of its episode
    group: int = 0  # number of its prompt in the step


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
        rows += _train_rows(update_groups, cfg)
        lengths = [each.trained for group in update_groups for each in group.episodes]
        sizes = [_size(each.row, work) for each in rows[first:]]
        plan = plan_batch(sizes, replicas, Limits.from_config(cfg.train))
        figures = BatchFigures.from_plan(sizes, plan)
        plan = [[[first + row for row in batch] for batch in share] for share in plan]
        divisor = divisor_of(lengths, cfg.rl.aggregate, cfg.rl.max_new_tokens)
        if cfg.rl.seen == "va_opd":  # the weights of the answers to a prompt have the sum 1
            divisor = float(len(update_groups))
        updates.append(Update(plan, divisor, figures))
    return TrainBatch(rows, updates)


def _train_rows(groups: Sequence[Group], cfg: Config) -> list[TrainRow]:
    """Return a row for each segment. All rows of an episode share its advantage, and its token
    weights are as in a single row, so that it counts once."""
    rows = []
    for group in groups:
        teacher, episodes = _teacher_of(group, cfg), group.episodes
        weights = token_weights([each.trained for each in episodes], cfg.rl.aggregate)
        advantages = group_advantages(group.rewards, cfg.rl.advantage)
        for episode, advantage, weight in zip(episodes, advantages, weights, strict=True):
            for each in episode.segments:
                sampled = torch.tensor([value for value in each.log_probs if value is not None])
                view = each.prompt_length, _teacher_prompt(episode, each)
                row = TrainRow(_row(each), sampled, advantage, weight, teacher, None, *view)
                rows.append(replace(row, episode=episode.number, group=episode.group))
    return rows


def _teacher_of(group: Group, cfg: Config) -> int:
    """Return the place of the teacher of a group's source."""
    names = list(teachers_of(cfg))
    first = group.episodes[0]
    if cfg.teacher.view is not None and first.teacher_opening is None:
        return -1
    if names in ([], [ALL_SOURCES]):
        return 0
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


def _teacher_prompt(episode: Episode, segment: Segment) -> Row | None:
    if episode.teacher_opening is None or segment.teacher_ids is None:
        return None
    pictures = [episode.teacher_opening, *segment.pictures[1:]]
    return prompt_row(segment.teacher_ids.tolist(), pictures)


def _row(segment: Segment) -> Row:
    row = prompt_row(segment.ids, segment.pictures)
    drawn_S = torch.tensor([each is not None for each in segment.log_probs])
    labels_S = torch.where(drawn_S, row.ids_S, IGNORE)
    return replace(row, labels_S=labels_S, routing_SLK=segment.routing_SLK)


def _size(row: Row, work: WorkModel) -> RowSize:
    patches, pairs, visuals = 0, 0, list[VisualSize]()
    for pixels_PC, grid_I3 in (part for name in GRID_OF for part in parts_of(row, name)):
        t, h, w = grid_I3.unbind(-1)
        counts = int((t * h * w).sum()), int((t * (h * w) ** 2).sum())
        # Rows that share pixels have the same object.
        visuals.append(VisualSize(id(pixels_PC), counts[0], float(work.visual(*counts))))
        patches, pairs = patches + counts[0], pairs + counts[1]
    supervised = int((row.labels_S != IGNORE).sum())
    images = 0 if row.image_grid_I3 is None else len(row.image_grid_I3)
    size = work.row_size(len(row.ids_S), supervised, patches, pairs, images)
    return replace(size, visuals=tuple(visuals))


def train_batch_to_bytes(train_batch: TrainBatch) -> bytes:
    """Serialize a train batch for `train_batch_from_bytes` on the other ranks."""
    rows = [each.row for each in train_batch.rows]
    names = ("advantage", "weight", "teacher", "prompt_length", "episode", "group")
    numbers = [{name: getattr(each, name) for name in names} for each in train_batch.rows]
    for each, own in zip(train_batch.rows, numbers, strict=True):
        if each.teacher_prompt is not None:
            own["teacher_prompt"] = len(rows)
            rows.append(each.teacher_prompt)
    columns: dict[str, list[Tensor]] = {name: [] for name in VISUAL_FIELDS}
    number_of: dict[tuple[int, int], int] = {}
    visuals = [_add_visuals(row, columns, number_of) for row in rows]
    without: dict[str, Any] = dict.fromkeys(VISUAL_FIELDS)
    texts = batch_of([replace(row, **without) for row in rows])
    columns |= {name: list(column) for name, column in texts.items()}
    columns["log_probs"] = [each.sampler_log_probs_N for each in train_batch.rows]
    tables = [each.teacher_table for each in train_batch.rows]
    columns["teacher_tables"] = [each for each in tables if each is not None]
    updates = [[each.plan, each.divisor, vars(each.figures)] for each in train_batch.updates]
    meta = {"visuals": visuals, "numbers": numbers, "updates": updates, "texts": [*texts.keys()]}
    return pack({name: (True, rows) for name, rows in columns.items()}, meta)


def _add_visuals(
    row: Row, columns: Mapping[str, list[Tensor]], number_of: dict[tuple[int, int], int]
) -> dict[str, list[int]]:
    """Add the row's pixels and grids to their columns, unless they are there. Return the numbers of
    its parts there."""
    numbers: dict[str, list[int]] = {name: [] for name in GRID_OF}
    for name, grid_name in GRID_OF.items():
        for pixels_PC, grid_I3 in parts_of(row, name):
            new = len(columns[name])
            numbers[name].append(number_of.setdefault((id(pixels_PC), id(grid_I3)), new))
            if numbers[name][-1] == new:
                columns[name].append(pixels_PC)
                columns[grid_name].append(grid_I3)
    return numbers


def _visuals_from(
    numbers: Mapping[str, Sequence[int]], columns: Mapping[str, Sequence[Tensor]]
) -> dict[str, Any]:
    """Return the visual fields of the row with these parts."""
    return join_parts(
        {
            name: [(columns[name][n], columns[grid_name][n]) for n in numbers[name]]
            for name, grid_name in GRID_OF.items()
        }
    )


def train_batch_from_bytes(data: bytes) -> TrainBatch:
    """Deserialize the result of `train_batch_to_bytes`."""
    fields, meta = unpack(data)
    columns = {name: rows for name, (_, rows) in fields.items()}
    texts = rows_of(TensorBatch({name: TensorList(columns[name]) for name in meta["texts"]}))
    shown = [
        replace(row, **_visuals_from(numbers, columns))
        for row, numbers in zip(texts, meta["visuals"], strict=True)
    ]
    rows = []
    for number, own in enumerate(meta["numbers"]):
        table = columns["teacher_tables"][number] if columns["teacher_tables"] else None
        prompt = shown[own.pop("teacher_prompt")] if "teacher_prompt" in own else None
        parts = {"teacher_table": table, "teacher_prompt": prompt, **own}
        rows.append(TrainRow(shown[number], columns["log_probs"][number], **parts))
    updates = [
        Update(plan, divisor, BatchFigures(**figures)) for plan, divisor, figures in meta["updates"]
    ]
    return TrainBatch(rows, updates)


# The labels of the result are the drawn tokens of the train row, in order.
View = Callable[[TrainRow], Row]


def same(each: TrainRow) -> Row:
    """Return the row as the student sees it. Its routers alone choose experts."""
    return each.row if each.row.routing_SLK is None else replace(each.row, routing_SLK=None)


def replayed(each: TrainRow) -> Row:
    """Return the row with the experts that the engine chose, as the trained model reads it."""
    return each.row


def of_teacher(each: TrainRow) -> Row:
    """Return the row as its teacher sees it, behind what teacher.view shows for its prompt."""
    if (prompt := each.teacher_prompt) is None:
        return same(each)
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
