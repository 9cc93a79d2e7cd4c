"""Collation: rows become micro-batches. KTO also needs mismatched rows: a prompt with the answer to
another prompt. The shapes are those of `micro_batch.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_vlm.data.batches.micro_batch import (
    REJECTED,
    ROW_REFERENCE,
    TEACHER_FIELDS,
    VISUAL_FIELDS,
    MicroBatch,
)
from megatron_vlm.data.tokens.row import (
    GRID_OF,
    IGNORE,
    Part,
    PlacedRow,
    Row,
    continue_row,
    cut_row,
    parts_of,
    place_row,
)
from megatron_vlm.data.tokens.sample import Example, Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import Tokens

_PADDING = np.array([0, IGNORE, 0, 0, 0], dtype=np.int32)


def collate(
    rows: Sequence[PlacedRow], places: Sequence[int], value_names: Sequence[str] = ()
) -> MicroBatch:
    """Pad rows on the right to the longest and concatenate their patches, of which a tensor that
    several rows have is taken once. Each row is an example of its own, at a place of the batch.
    `value_names` are the names that the rows were placed with."""
    lengths = tuple(len(row.tokens_S5) for row in rows)
    longest = max(lengths)
    padding = np.broadcast_to(_PADDING, (longest, 5))
    # Rows and paddings are concatenated once. Padding is on the right only, where causal attention
    # hides it from every token, so its ids may be anything.
    pieces = [
        piece
        for row, length in zip(rows, lengths, strict=True)
        for piece in (row.tokens_S5, padding[length:])
        if len(piece)
    ]
    tokens_BS5 = torch.from_numpy(np.concatenate(pieces).reshape(len(rows), longest, 5))
    optional: dict[str, Any] = {"value_names": tuple(value_names)}
    optional |= _concatenate_visuals([row.row for row in rows])
    optional["visual"] = any(optional[name] is not None for name in VISUAL_FIELDS)
    if any(row.targets_SJ is not None for row in rows):
        optional |= _several_targets(rows, longest, len(value_names))
    elif value_names:
        values = [torch.from_numpy(row.values_SF) for row in rows if row.values_SF is not None]
        optional["values_BSF"] = pad_sequence(values, batch_first=True)
    if any(row.row.targets is not None for row in rows):
        row_targets = [row.row.targets for row in rows]
        optional["target_shapes"] = tuple(
            t if t is None else tuple(t.shape[1:]) for t in row_targets
        )
    if any(row.weights_S is not None for row in rows):
        weights = [
            torch.ones(length) if row.weights_S is None else torch.from_numpy(row.weights_S)
            for row, length in zip(rows, lengths, strict=True)
        ]
        optional["weights_BS"] = pad_sequence(weights, batch_first=True)
    optional |= _concatenate_teacher([row.row for row in rows if row.is_supervised])
    optional["routing_TLK"] = _concatenate_routing([row.row.routing_SLK for row in rows], lengths)
    return MicroBatch(tokens_BS5, lengths, tuple((place, 0) for place in places), **optional)


def collate_examples(
    examples: Mapping[int, Sequence[PlacedRow]],
    rejected: Mapping[int, Sequence[bool]],
    reference: Mapping[int, Sequence[float]] | None = None,
) -> MicroBatch:
    """Collate the rows of examples, by their places in the global batch. `rejected` and `reference`
    are REJECTED and, if it is known, ROW_REFERENCE of each row."""
    flat = [row for rows in examples.values() for row in rows]
    places = tuple((place, n) for place, rows in examples.items() for n in range(len(rows)))
    values = {REJECTED: torch.tensor([flag for place in examples for flag in rejected[place]])}
    if reference is not None:
        listed = [value for place in examples for value in reference[place]]
        values[ROW_REFERENCE] = torch.tensor(listed, dtype=torch.float64)
    return replace(collate(flat, ()), rows=places, row_values=values)


def cut_micro_batches(
    rows: Sequence[Row],
    size: int,
    tokens: Tokens,
    value_names: Sequence[str] = (),
    first_row: int = 0,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `size` rows; errors count from `first_row`."""
    if not rows:
        raise DataError(": every data parallel rank needs at least one row", key="rows", found=[])
    placed = [
        place_row(row, tokens, f"row {i}", value_names) for i, row in enumerate(rows, first_row)
    ]
    ends = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    return [collate(placed[start:end], range(start, end), value_names) for start, end in ends]


def filler_batch() -> MicroBatch:
    """Return one token, without image and loss, for a rank without a row of its own."""
    return MicroBatch(torch.from_numpy(_PADDING.copy()).view(1, 1, 5), (1,), ())


def _concatenate_visuals(rows: Sequence[Row]) -> dict[str, Any]:
    """Concatenate images and videos. Rows share a tensor if it is the same object: equal pixels are
    not looked for."""
    visuals: dict[str, Any] = {}
    visual_of_O: list[int] = []
    count = 0
    for pixels_name, grid_name in GRID_OF.items():
        different: dict[tuple[int, ...], Part] = {}
        first_of: dict[tuple[int, ...], int] = {}
        for pixels_PC, grid_I3 in (part for row in rows for part in parts_of(row, pixels_name)):
            key = (id(pixels_PC), *grid_I3.flatten().tolist())
            if key not in different:
                different[key], first_of[key] = (pixels_PC, grid_I3), count
                count += len(grid_I3)
            visual_of_O += range(first_of[key], first_of[key] + len(grid_I3))
        visuals[pixels_name] = _cat([pixels for pixels, _ in different.values()], pixels_name)
        visuals[grid_name] = _cat([grid for _, grid in different.values()], grid_name)
    if len(visual_of_O) > count:
        visuals["visual_of_O"] = torch.tensor(visual_of_O, dtype=torch.int32)
    return visuals


def _several_targets(rows: Sequence[PlacedRow], longest: int, values: int) -> dict[str, Any]:
    """Return targets and values of rows of which some have several targets at each position."""
    max_targets = max(1 if row.targets_SJ is None else row.targets_SJ.shape[1] for row in rows)
    targets_BSJ = torch.full((len(rows), longest, max_targets), IGNORE)
    values_BSJF = torch.zeros(len(rows), longest, max_targets, values)
    for place, row in enumerate(rows):
        targets_SJ, values_SJF = row.targets_SJ, row.values_SJF
        if targets_SJ is None:
            targets_SJ = row.tokens_S5[:, 1:2]
            values_SJF = None if row.values_SF is None else row.values_SF[:, None]
        length, count = targets_SJ.shape
        targets_BSJ[place, :length, :count] = torch.from_numpy(targets_SJ)
        if values_SJF is not None:
            values_BSJF[place, :length, :count] = torch.from_numpy(values_SJF)
    return {"targets_BSJ": targets_BSJ, "values_BSJF": values_BSJF if values else None}


def _concatenate_routing(
    routing_of_rows: Sequence[Tensor | None], lengths: Sequence[int]
) -> Tensor | None:
    """Concatenate the experts of all tokens. Routers choose for rows without routing."""
    shapes = {tuple(each.shape[1:]) for each in routing_of_rows if each is not None}
    if not shapes:
        return None
    if len(shapes) > 1 or len(shape := shapes.pop()) != 2:
        raise DataError(
            "has a different shape for the tokens of some rows of one batch",
            key="routing",
            remedy="give [tokens, layers with experts, experts of a token] for each row",
        )
    table_TLK = torch.cat(
        [
            torch.full((length, *shape), -1, dtype=torch.int16) if each is None else each
            for each, length in zip(routing_of_rows, lengths, strict=True)
        ]
    )
    return table_TLK if table_TLK.dtype is torch.int16 else table_TLK.to(torch.int32)


def _concatenate_teacher(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Concatenate what a teacher has for the supervised tokens of these rows, row by row."""
    pairs = [(row.teacher_ids_NJ, row.teacher_log_probs_NR) for row in rows]
    present = [(ids, log_probs) for ids, log_probs in pairs if ids is not None]
    if not present:
        return {}
    if len(present) < len(rows) or len({ids.shape[1] for ids, _ in present}) > 1:
        raise DataError(
            "has several widths, or is missing, in rows of one micro-batch",
            key="teacher_ids",
            remedy="give the same number of tokens for each supervised token of all rows",
        )
    columns = zip(*present, strict=True)
    return {
        name: torch.cat([tensor for tensor in column if tensor is not None])
        for name, column in zip(TEACHER_FIELDS, columns, strict=True)
    }


def _cat(tensors: Sequence[Tensor | None], name: str) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None and len(tensor)]
    kinds = {tensor.dtype for tensor in present}
    if len(kinds) > 1:  # torch.cat would silently turn bytes into floats
        raise DataError(
            f"has several dtypes in one micro-batch: {', '.join(sorted(map(str, kinds)))}",
            key=name.rpartition("_")[0],
            remedy="give one dtype",
        )
    return torch.cat(present) if present else None


def mismatched_rows(rows: Sequence[PlacedRow], partner: Example, tokens: Tokens) -> list[PlacedRow]:
    """Return the prompt of each row, with its pictures, followed by an answer of the partner."""
    return [
        _with_answer(placed, partner[min(number, len(partner) - 1)], tokens)
        for number, placed in enumerate(rows)
    ]


def _with_answer(placed: PlacedRow, other: Sample, tokens: Tokens) -> PlacedRow:
    row = placed.row
    start = int((row.labels_S != IGNORE).nonzero()[0])
    first = int(other.trained_S.nonzero()[0][0])
    ids, trained = other.ids_S[first:], other.trained_S[first:]
    # Pictures in the other answer are left out, since the row has no pixels of them.
    is_text = ~torch.isin(
        torch.from_numpy(ids), torch.tensor([tokens.image_id, tokens.video_id])
    ).numpy()
    ids, trained = ids[is_text], trained[is_text]
    joined = continue_row(cut_row(row, start, tokens), ids.tolist())
    joined.labels_S[start:][torch.from_numpy(~trained)] = IGNORE
    return place_row(joined, tokens, "a prompt with another answer")
