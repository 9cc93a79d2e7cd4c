"""One rank of a replica loads data; the others get from it what they need, and no more.

Tokens, targets and positions go to every rank of the replica, and the values and
weights of the loss with them; pixels, still as bytes, only to the tensor parallel ranks of stage 0.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batch.micro_batch import LOSS_FIELDS, VISUAL_FIELDS, MicroBatch
from megatron_vlm.data.tensors.tensor_bytes import DTYPES, dtype_name
from megatron_vlm.distributed.grid import Grid
from megatron_vlm.distributed.messages import broadcast_bytes, broadcast_json
from megatron_vlm.errors import DataError

TOKEN_FIELDS = ("tokens_BS5", *LOSS_FIELDS)
_FACTS = ("lengths", "rows", "value_names")


def share_json(mine: Any, grid: Grid, device: torch.device) -> Any:
    """What the loading rank has, as JSON can hold it, or its DataError, on every rank of the
    replica. A collective."""
    failed = isinstance(mine, DataError)
    said = {"error": str(mine)} if failed else {"value": mine}
    found = broadcast_json(said, grid.leader, grid.replica.group, device)
    if "error" in found:
        raise mine if failed else DataError(found["error"])
    return found["value"]


def share_bytes(mine: bytes | None, grid: Grid, device: torch.device) -> bytes:
    """The bytes of the loading rank on every rank of the replica. A collective."""
    return broadcast_bytes(mine, grid.leader, grid.replica.group, device)


def share_batch(
    mine: tuple[list[MicroBatch], Any] | None, grid: Grid, device: torch.device
) -> tuple[list[MicroBatch], Any]:
    """The loading rank's micro-batches, and what comes with them as JSON can hold it, on every
    rank of the replica. A collective."""
    if grid.replica.size == 1:
        assert mine is not None
        return mine
    frames, extra = share_json(_describe(mine), grid, device)
    source = grid.leader
    batches = [None] * len(frames) if mine is None else mine[0]
    received = []
    for frame, batch in zip(frames, batches, strict=True):
        parts: dict[str, Any] = {name: tuple(frame[name]) for name in _FACTS}
        parts |= {
            name: _broadcast(frame, batch, name, source, grid.replica.group, device)
            for name in TOKEN_FIELDS
        }
        parts |= {
            name: _broadcast(frame, batch, name, source, grid.tp.group, device)
            if grid.first
            else None
            for name in VISUAL_FIELDS
        }
        received.append(MicroBatch(**parts))
    return received, extra


def _describe(mine: Any) -> Any:
    """The batches without their tensors: shapes and types instead."""
    if mine is None:
        return None
    batches, extra = mine
    frames = []
    for batch in batches:
        frame: dict[str, Any] = {name: list(getattr(batch, name)) for name in _FACTS}
        for name in (*TOKEN_FIELDS, *VISUAL_FIELDS):
            tensor = getattr(batch, name)
            frame[name] = None if tensor is None else (tensor.shape, dtype_name(tensor.dtype))
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
    if given is None:
        given = torch.empty(shape, dtype=DTYPES[dtype], device=device)
    tensor = given.to(device)
    dist.broadcast(tensor, source, group=group)
    return tensor
