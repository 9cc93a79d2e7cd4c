"""Collation: rows become micro-batches. KTO also needs mismatched rows: a prompt with the answer to
another prompt. Hidden pictures have replaced patches, to show how far answers depend on what the
model sees; ids, grids and positions stay. `micro_batch.py` explains the shapes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import REJECTED, ROW_REFERENCE, MicroBatch
from megatron_vlm.data.tokens.row import (
    COLUMNS,
    GRID_OF,
    IGNORE,
    VALUE,
    VISUAL_FIELDS,
    Part,
    Row,
    continue_row,
    parts_of,
    place_row,
    slice_row,
)
from megatron_vlm.data.tokens.sample import Example, Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import Tokens

_PADDING = np.array([0, IGNORE, 0, 0, 0], dtype=np.int32)


def collate(rows: Sequence[Row], places: Sequence[int]) -> MicroBatch:
    """Pad placed rows on the right to the longest and concatenate their columns and patches, of
    which a tensor that several rows have is taken once. Each row is an example of its own, at a
    place of the batch."""
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
    optional: dict[str, Any] = {"columns": _concatenate_columns(rows)}
    optional |= _concatenate_visuals(rows)
    optional["visual"] = any(optional[name] is not None for name in VISUAL_FIELDS)
    own_targets = [row.targets for row in rows]
    if any(targets is not None for targets in own_targets):
        shapes = (None if targets is None else tuple(targets.shape[1:]) for targets in own_targets)
        optional["target_shapes"] = tuple(shapes)
        if any(targets is not None and targets.dim() > 1 for targets in own_targets):
            optional["targets_BSJ"] = _several_targets(rows, longest)
    return MicroBatch(tokens_BS5, lengths, tuple((place, 0) for place in places), **optional)


def collate_examples(
    examples: Mapping[int, Sequence[Row]],
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


def split_micro_batches(
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
    return [collate(placed[start:end], range(start, end)) for start, end in ends]


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


def _several_targets(rows: Sequence[Row], longest: int) -> Tensor:
    """Return the targets [B, S, J]; some rows have several at each position."""
    tables = [
        row.targets
        if row.targets is not None and row.targets.dim() > 1
        else torch.from_numpy(row.tokens_S5[:, 1:2])
        for row in rows
    ]
    targets_BSJ = torch.full((len(rows), longest, max(each.shape[1] for each in tables)), IGNORE)
    for place, targets_SJ in enumerate(tables):
        length, count = targets_SJ.shape
        targets_BSJ[place, :length, :count] = targets_SJ
    return targets_BSJ


def _concatenate_columns(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Concatenate each column row by row, filled where a row lacks it."""
    columns, names = {}, dict.fromkeys(name for row in rows for name in row.columns)
    tokens = [len(row.tokens_S5) for row in rows]
    targets = [row.num_targets for row in rows if names]  # once for all columns
    for name in names:
        column, of_rows = COLUMNS.get(name, VALUE), [row.columns.get(name) for row in rows]
        counts = tokens if column.per == "token" else targets
        pairs = [pair for pair in zip(of_rows, counts, strict=True) if pair[1]]
        shapes = {tuple(each.shape[1:]) for each, _ in pairs if each is not None}
        if not shapes:
            continue
        shape, is_missing = shapes.pop(), any(each is None for each, _ in pairs)
        if shapes or len(shape) != column.rank or (is_missing and column.fill is None):
            problem, remedy = column.uneven
            raise DataError(problem, key=name, remedy=remedy)
        table = torch.cat(
            [
                torch.full((count, *shape), column.fill or 0, dtype=column.dtypes[0])
                if each is None
                else each
                for each, count in pairs
            ]
        )
        kept = column.dtypes or (table.dtype,)
        columns[name] = table if table.dtype in kept else table.to(kept[-1])
    return columns


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


def mismatched_rows(rows: Sequence[Row], partner: Example, tokens: Tokens) -> list[Row]:
    """Return the prompt of each row, with its pictures, followed by an answer of the partner."""
    return [
        _with_answer(row, partner[min(number, len(partner) - 1)], tokens)
        for number, row in enumerate(rows)
    ]


def _with_answer(row: Row, other: Sample, tokens: Tokens) -> Row:
    start = int((row.labels_S != IGNORE).nonzero()[0])
    first = int(other.trained_S.nonzero()[0][0])
    ids, trained = other.ids_S[first:], other.trained_S[first:]
    # Pictures in the other answer are left out, since the row has no pixels of them.
    is_text = ~torch.isin(
        torch.from_numpy(ids), torch.tensor([tokens.image_id, tokens.video_id])
    ).numpy()
    ids, trained = ids[is_text], trained[is_text]
    joined = continue_row(slice_row(row, start, tokens), ids.tolist())
    joined.labels_S[start:][torch.from_numpy(~trained)] = IGNORE
    return place_row(joined, tokens, "a prompt with another answer")


BLACK_SHARE = 0.5  # probability of a black patch, as in VPPO (arXiv 2510.09285)

Pictured = TypeVar("Pictured", Row, MicroBatch)


def hide_pictures(pictured: Pictured, hide: Callable[[Tensor], Tensor]) -> Pictured:
    """Return a row or a micro-batch with each table of patches replaced by `hide` of it."""
    shown = {name: getattr(pictured, name) for name in GRID_OF}
    hidden: dict[str, Any] = {name: hide(each) for name, each in shown.items() if each is not None}
    return replace(pictured, **hidden)


def grey(pixels_PC: Tensor) -> Tensor:
    """Return patches of medium grey, which is 0 in floats."""
    return torch.full_like(pixels_PC, 128 if pixels_PC.dtype == torch.uint8 else 0)


def pixelated(pixels_PC: Tensor) -> Tensor:
    """Return patches that have the mean colour of the real ones."""
    values_P3F = pixels_PC.view(len(pixels_PC), 3, -1)
    mean_P31 = values_P3F.float().mean(2, keepdim=True)
    if pixels_PC.dtype == torch.uint8:
        mean_P31 = mean_P31.round()
    return mean_P31.to(pixels_PC.dtype).expand_as(values_P3F).reshape(pixels_PC.shape)


def black_patches(pixels_PC: Tensor, seed: int) -> Tensor:
    """Return the patches, of which random ones are black."""
    assert pixels_PC.dtype == torch.uint8, "the black of floats depends on their processor"
    generator = torch.Generator().manual_seed(seed)
    is_black_P = torch.rand(len(pixels_PC), generator=generator) < BLACK_SHARE
    return pixels_PC.masked_fill(is_black_P[:, None].to(pixels_PC.device), 0)
