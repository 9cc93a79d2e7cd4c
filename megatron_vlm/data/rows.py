"""Rows as a TensorBatch and back: how a controller hands them to workers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vlm.data.batch import Row
from megatron_vlm.data.tensor_batch import TensorBatch
from megatron_vlm.data.tensors import TensorList
from megatron_vlm.errors import DataError

# Field of the batch, field of the row. The first two are needed, the others optional.
_FIELDS = {
    "ids": "ids_S",
    "labels": "labels_S",
    "pixel_values": "pixel_values_PC",
    "image_grid_thw": "image_grid_I3",
    "pixel_values_videos": "pixel_values_videos_PC",
    "video_grid_thw": "video_grid_I3",
}
_NEEDED = ("ids", "labels")


def batch_of(rows: Sequence[Row]) -> TensorBatch:
    """One TensorList a field; a row without images is an empty tensor among the others."""
    fields = {}
    for name, field in _FIELDS.items():
        values = [getattr(row, field) for row in rows]
        if name in _NEEDED or any(value is not None for value in values):
            fields[name] = TensorList([torch.empty(0) if v is None else v for v in values])
    return TensorBatch(fields)


def rows_of(batch: TensorBatch) -> list[Row]:
    """The rows of a batch; fields that a Row has no place for are left to others."""
    if missing := [name for name in _NEEDED if name not in batch]:
        raise DataError(f"the batch has no field {missing[0]!r}; it has {', '.join(batch.keys())}")

    def value(row: dict[str, Tensor], name: str) -> Tensor | None:
        tensor = row.get(name)
        return tensor if name in _NEEDED or (tensor is not None and len(tensor)) else None

    return [
        Row(**{field: value(row, name) for name, field in _FIELDS.items()})  # type: ignore[arg-type]
        for row in batch
    ]
