"""Distribution of data that one rank of a replica loads. The other ranks get only the parts that
they need.

Tokens, targets and positions go to every rank of the replica, together with grids and the values
and weights of the loss: to its host, in one message for a step. Pixels, still as bytes, and the
other inputs of their patches go only to the tensor parallel ranks of stage 0, from device to
device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tensors.tensor_bytes import DTYPES, Field, dtype_name, pack, unpack
from megatron_vlm.data.tokens.row import GRID_OF
from megatron_vlm.distributed.collectives import broadcast_bytes, broadcast_json
from megatron_vlm.distributed.device import to_device
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import DataError

_OF_FIRST = (*GRID_OF.values(), "visual_of_O")
_ON_HOST = ("tokens_BS5", "targets_BSJ", *_OF_FIRST)
_TABLES = ("columns", "row_values")  # tensors by name, or None
_FACTS = ("lengths", "rows", "target_shapes")


def share_json(value: Any, grid: RankGroups) -> Any:
    """Send the loading rank's JSON value, or its DataError, to its replica. A collective."""
    failed = isinstance(value, DataError)
    message = {"error": str(value)} if failed else {"value": value}
    received = broadcast_json(message, grid.leader, grid.replica_hosts)
    if "error" in received:
        raise value if failed else DataError(received["error"])
    return received["value"]


def share_bytes(data: bytes | None, grid: RankGroups) -> bytes:
    """Send the bytes of the loading rank to every rank of the replica. A collective."""
    return broadcast_bytes(data, grid.leader, grid.replica_hosts)


def share_batch(
    local_batch: tuple[list[MicroBatch], Any] | None, grid: RankGroups, device: torch.device
) -> tuple[list[MicroBatch], Any]:
    """Send the loading rank's micro-batches and a JSON value to its replica. A collective."""
    if grid.replica.size == 1:
        assert local_batch is not None
        return local_batch
    packed = None if local_batch is None else _pack(*local_batch)
    fields, meta = unpack(share_bytes(packed, grid))
    received = []
    for number, frame in enumerate(meta["frames"]):
        parts: dict[str, Any] = {name: tuple(frame[name]) for name in _FACTS}
        parts["rows"] = tuple(map(tuple, frame["rows"]))
        for table in _TABLES:
            if (names := frame[table]) is not None:
                parts[table] = {name: fields[f"{number} {table} {name}"][1][0] for name in names}
        for name in _ON_HOST:
            _, tensors = fields.get(f"{number} {name}", (False, [None]))
            parts[name] = tensors[0]
        batch = None if local_batch is None else local_batch[0][number]
        if grid.first:
            for name in GRID_OF:
                local = None if batch is None else getattr(batch, name)
                parts[name] = _share_patches(frame[name], local, grid, device)
            given = {} if batch is None else batch.patch_inputs
            parts["patch_inputs"] = {
                name: _share_patches(kind, given.get(name), grid, device)
                for name, kind in frame["patch_inputs"].items()
            }
        else:
            parts |= dict.fromkeys((*_OF_FIRST, *GRID_OF))
        parts["visual"] = frame["visual"]
        received.append(MicroBatch(**parts))
    return received, meta["extra"]


def _pack(batches: Sequence[MicroBatch], extra: Any) -> bytes:
    """Pack the fields that hosts need into one message; of patches only shapes and types."""
    fields: dict[str, Field] = {}
    frames = []
    for number, batch in enumerate(batches):
        frame: dict[str, Any] = {name: list(getattr(batch, name)) for name in _FACTS}
        frame["visual"] = batch.visual
        for table in _TABLES:
            frame[table] = None if (given := getattr(batch, table)) is None else list(given)
            for name, tensor in (given or {}).items():
                fields[f"{number} {table} {name}"] = (False, [tensor])
        for name in GRID_OF:
            tensor = getattr(batch, name)
            frame[name] = None if tensor is None else _kind(tensor)
        frame["patch_inputs"] = {name: _kind(each) for name, each in batch.patch_inputs.items()}
        for name in _ON_HOST:
            if (tensor := getattr(batch, name)) is not None:
                fields[f"{number} {name}"] = (False, [tensor])
        frames.append(frame)
    return pack(fields, {"frames": frames, "extra": extra})


def _kind(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), dtype_name(tensor.dtype)


def _share_patches(
    shape_and_dtype: tuple[list[int], str] | None,
    local: Tensor | None,
    grid: RankGroups,
    device: torch.device,
) -> Tensor | None:
    """Send patches to all ranks of the first stage, which the loading rank belongs to."""
    if shape_and_dtype is None or grid.tp.size == 1:
        return local
    shape, dtype = shape_and_dtype
    if local is None:
        patches = torch.empty(shape, dtype=DTYPES[dtype], device=device)
    else:
        patches = to_device(local, device)
    dist.broadcast(patches, grid.leader, group=grid.tp.group)
    return patches
