"""Split of a batch into one part for each data parallel replica.

Pixel values go to the first stage alone. The other stages get patches without values ([P, 0]) and
still count them, so that a wrong batch is an error on every rank and not a hang on some ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_vlm.data.tensors.rows import FIELDS, MASK, PIXEL_FIELDS, batch_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, Value
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import DataError

BatchLike = TensorBatch | Sequence[Row]


@dataclass(frozen=True)
class ReplicaBatch:
    """Part of one replica: all fields without patch values, and the patch values separately."""

    batch: TensorBatch
    pixels: TensorBatch | None
    first_row: int  # number of the part's first row in the whole batch

    def all_fields(self) -> TensorBatch:
        """Return all fields, with the patch values if this rank has them."""
        return self.batch if self.pixels is None else self.batch.with_fields(**self.pixels.fields)


def even_parts(rows: BatchLike, count: int, value_names: Sequence[str] = ()) -> list[ReplicaBatch]:
    """Split rows into parts of equal length. Rows without images and loss fill up the last
    parts."""
    batch = select_fields(rows, (*FIELDS, MASK, *value_names))
    if not len(batch):
        raise DataError("there are no rows", place="the batch", remedy="give at least one row")
    return _cut_batch(_fill_batch(batch, -len(batch) % count), count)


def prompt_parts(rows: BatchLike, count: int) -> list[ReplicaBatch]:
    """Split prompts into parts as even as the number of rows allows; some may be empty. Labels and
    targets are ignored."""
    return _cut_batch(_prompts(rows), count)


def dealt_parts(rows: BatchLike, replicas: Sequence[int], count: int) -> list[ReplicaBatch]:
    """Split prompts into `count` parts, where `replicas` has the part of each row."""
    batch, parts = _prompts(rows), []
    for replica in range(count):
        places = [place for place, owner in enumerate(replicas) if owner == replica]
        parts += _cut_batch(batch[places], 1)
    return parts


def _prompts(rows: BatchLike) -> TensorBatch:
    batch = select_fields(rows, (name for name in FIELDS if name not in ("labels", "targets")))
    labels = TensorList([torch.full_like(ids_S, IGNORE) for ids_S in _rows(batch["ids"])])
    return batch.with_fields(labels=labels)


def select_fields(rows: BatchLike, names: Iterable[str]) -> TensorBatch:
    """Return the named fields. The other fields of a controller's batch are left out."""
    batch = rows if isinstance(rows, TensorBatch) else batch_of(rows)
    if "ids" not in batch:
        raise DataError(
            f"is missing from the fields {', '.join(batch.keys())}", place="the batch", key="ids"
        )
    return batch.select(name for name in dict.fromkeys(names) if name in batch)


def _fill_batch(batch: TensorBatch, missing: int) -> TensorBatch:
    if not missing:
        return batch
    filler = {"ids": torch.zeros(1), "labels": torch.full((1,), IGNORE), MASK: torch.zeros(1)}
    fields = {}
    for name, value in batch.items():
        row = filler.get(name, torch.empty(0)).to(value.dtype)
        fields[name] = TensorList([*_rows(value), *[row] * missing])
    return TensorBatch(fields, batch.meta)


def _cut_batch(batch: TensorBatch, count: int) -> list[ReplicaBatch]:
    parts, first_row = [], 0
    for chunk in batch.chunk(count):
        names = [name for name in PIXEL_FIELDS if name in chunk]
        bare = {name: TensorList([row[:, :0] for row in _patches(chunk[name])]) for name in names}
        pixels = chunk.select(names) if names else None
        parts.append(ReplicaBatch(chunk.with_fields(**bare), pixels, first_row))
        first_row += len(chunk)
    return parts


def _patches(value: Value) -> list[torch.Tensor]:
    return [row if row.dim() == 2 else row.new_empty(0, 0) for row in _rows(value)]


def _rows(value: Value) -> list[torch.Tensor]:
    return list(value)
