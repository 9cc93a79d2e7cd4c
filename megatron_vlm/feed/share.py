"""One rank of a replica loads data; the others get from it what they need, and no more.

Tokens, targets and positions go to every rank of the replica, and the values that a loss reads
with them; pixels, still as bytes, only to the tensor parallel ranks of stage 0.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batch.micro_batch import VISUAL_FIELDS, MicroBatch
from megatron_vlm.distributed.grid import Grid
from megatron_vlm.errors import DataError

TOKEN_FIELDS = ("tokens_BS5", "values_BSF")


def share_object(mine: Any, grid: Grid, device: torch.device) -> Any:
    """A small object of the loading rank, or its error, on every rank of the replica. A
    collective."""
    box = [mine]
    grid.from_leader(box, device)
    if isinstance(box[0], DataError):
        raise box[0]
    return box[0]


def share_batch(
    mine: tuple[list[MicroBatch], Any] | None, grid: Grid, device: torch.device
) -> tuple[list[MicroBatch], Any]:
    """The loading rank's micro-batches and whatever small thing comes with them, on every rank of
    the replica. A collective."""
    if grid.replica.size == 1:
        assert mine is not None
        return mine
    frames, extra = share_object(_describe(mine), grid, device)
    source = dist.get_process_group_ranks(grid.replica.group)[0]
    batches = [None] * len(frames) if mine is None else mine[0]
    received = []
    for frame, batch in zip(frames, batches, strict=True):
        table = {
            name: _broadcast(frame, batch, name, source, grid.replica.group, device)
            for name in TOKEN_FIELDS
        }
        visual = {
            name: _broadcast(frame, batch, name, source, grid.tp.group, device)
            if grid.first
            else None
            for name in VISUAL_FIELDS
        }
        received.append(replace(frame["frame"], **table, **visual))
    return received, extra


def _describe(mine: Any) -> Any:
    """The batches without their tensors: shapes and types instead."""
    if mine is None:
        return None
    batches, extra = mine
    empty = torch.empty(0)
    frames = []
    for batch in batches:
        bare = {**dict.fromkeys(VISUAL_FIELDS), "tokens_BS5": empty, "values_BSF": None}
        frame: dict[str, Any] = {"frame": replace(batch, **bare)}
        for name in (*TOKEN_FIELDS, *VISUAL_FIELDS):
            tensor = getattr(batch, name)
            frame[name] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        frames.append(frame)
    return frames, extra


def _broadcast(
    frame: dict[str, Any],
    batch: MicroBatch | None,
    name: str,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor | None:
    if frame[name] is None:
        return None
    shape, dtype = frame[name]
    given = getattr(batch, name) if batch is not None else None
    tensor = torch.empty(shape, dtype=dtype, device=device) if given is None else given.to(device)
    dist.broadcast(tensor, source, group=group)
    return tensor
