"""Rows as a TensorBatch and back: the form in which a controller sends them to workers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.row import COLUMNS, IGNORE, Row
from megatron_vlm.errors import DataError

# Field of the batch: field of the row, next to COLUMNS. The first two are required.
_FIELDS = {
    "ids": "ids_S",
    "labels": "labels_S",
    "pixel_values": "pixel_values_PC",
    "image_grid_thw": "image_grid_I3",
    "pixel_values_videos": "pixel_values_videos_PC",
    "video_grid_thw": "video_grid_I3",
    "targets": "targets",
}
PIXEL_FIELDS = ("pixel_values", "pixel_values_videos")
MASK = "response_mask"  # in place of labels: true for the supervised tokens
VALUES = ("advantages", "old_log_probs", "ref_log_probs")  # values that our losses read
_NEEDED = ("ids", "labels")


def row_fields() -> tuple[str, ...]:
    """Return the fields of a batch that are of rows, without values that a loss names."""
    return (*_FIELDS, MASK, *COLUMNS)


def batch_of(rows: Sequence[Row]) -> TensorBatch:
    """Return a batch with a TensorList for each field, which is empty where a row lacks it."""
    columns = {name: [getattr(row, field) for row in rows] for name, field in _FIELDS.items()}
    columns |= {name: [row.given(name) for row in rows] for name in COLUMNS}
    named = dict.fromkeys(name for row in rows for name in row.values_S)
    for name in (name for name in named if name not in COLUMNS or COLUMNS[name].field):
        if name in columns or name == MASK:
            raise DataError(
                "is another field of a batch already",
                place="values_S",
                key=name,
                remedy="choose another name",
            )
        columns[name] = [row.values_S.get(name) for row in rows]
    fields = {
        name: TensorList([torch.empty(0) if value is None else value for value in values])
        for name, values in columns.items()
        if name in _NEEDED or any(value is not None for value in values)
    }
    return TensorBatch(fields)


def rows_of(batch: TensorBatch, value_names: Sequence[str] = VALUES) -> list[Row]:
    """Return the rows of a batch, with the named values it has."""
    if "ids" not in batch or not ("labels" in batch or MASK in batch or "targets" in batch):
        missing, neither = ("ids", "") if "ids" not in batch else ("labels", f", nor is {MASK}")
        raise DataError(
            f"is not among the fields{neither}: {', '.join(batch.keys())}",
            place="the batch",
            key=missing,
        )
    names = [name for name in dict.fromkeys((*COLUMNS, *value_names)) if name in batch]
    return [_row(row, names, place) for place, row in enumerate(batch)]


def _row(row: dict[str, Tensor], names: Sequence[str], place: int) -> Row:
    fields = {
        field: row[name]
        for name, field in _FIELDS.items()
        if name in row and (name in _NEEDED or len(row[name]))
    }
    if "labels_S" not in fields:
        ids_S = row["ids"]
        mask_S = row.get(MASK, torch.zeros_like(ids_S))  # absent if the row has targets alone
        if mask_S.shape != ids_S.shape:
            raise DataError(
                f"has shape {tuple(mask_S.shape)}, and ids has {tuple(ids_S.shape)}",
                place=f"row {place}",
                key=MASK,
                remedy="give both the same shape",
            )
        fields["labels_S"] = torch.where(mask_S.bool(), ids_S, IGNORE)
    # An empty tensor stands for an absent one.
    values_S = {name: row[name] for name in names if len(row[name])}
    own = [name for name in values_S if name in COLUMNS and COLUMNS[name].field]
    fields |= {COLUMNS[name].field: values_S.pop(name) for name in own}
    return Row(**fields, values_S=values_S)  # type: ignore[arg-type]
