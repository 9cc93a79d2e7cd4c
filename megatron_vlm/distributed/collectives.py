"""Bytes and JSON between ranks, as tensors of bytes. All functions are collectives of the group, by
default of `host_group`. Tensors for another group lie on `device`.

torch's own collectives for objects unpickle what arrives, and a pickle may run any program: anyone
who can write to one connection of a job would control its machines. Here a message is only data."""

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.distributed.device import to_device

Group = dist.ProcessGroup | None  # None: all ranks, from host to host
HOST = torch.device("cpu")
_HOST_GROUP = "HOST_GROUP"
_NO_LIMIT = datetime.timedelta(days=7)  # the milliseconds of 25 do not fit into an int


def make_host_group() -> None:
    """Create the group of `host_group`, unless it is there. A collective of all ranks."""
    if _find_host_group() is None:
        dist.new_group(timeout=_NO_LIMIT, backend="gloo", group_desc=_HOST_GROUP)


def host_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks, for what comes from a host and goes to a host. NCCL would
    keep a GPU busy while a rank waits, and end the job after its time-out, even if another rank is
    still loading or writing. Here the watchdog alone decides how long a rank may take."""
    world: Any = dist.group.WORLD  # somebody else has made it, and not with NCCL
    return _find_host_group() or world


def _find_host_group() -> dist.ProcessGroup | None:
    groups = dist.distributed_c10d._world.pg_map
    return next((group for group in groups if group.group_desc == _HOST_GROUP), None)


def broadcast_bytes(message: bytes | None, source: int, group: Group = None) -> bytes:
    """Return the bytes of rank `source`, of the whole job, on every rank of a group of hosts."""
    content = message if dist.get_rank() == source else None
    assert content is not None or dist.get_rank() != source
    group = group or host_group()
    if group.size() == 1:
        return content or b""
    size = _number(0 if content is None else len(content), HOST)
    dist.broadcast(size, source, group=group)
    count = int(size) if content is None else len(content)
    if not count:
        return b""
    data = _empty_bytes(count, HOST) if content is None else _pack_bytes(content, HOST)
    dist.broadcast(data, source, group=group)
    return _unpack_bytes(data)


def broadcast_json(value: Any, source: int, group: Group = None) -> Any:
    """Return the JSON value of rank `source` on every rank of the group, with tuples as lists."""
    text = json.dumps(value).encode() if dist.get_rank() == source else None
    return json.loads(broadcast_bytes(text, source, group))


def all_gather_bytes(
    message: bytes, group: Group = None, device: torch.device = HOST
) -> list[bytes]:
    """Return the bytes of each rank of the group, in the order of the ranks, on all of them."""
    group = group or host_group()
    sizes, padded = _gather_sizes(message, group, device)
    buffers = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(buffers, padded, group=group)
    return [_unpack_bytes(data[:size]) for data, size in zip(buffers, sizes, strict=True)]


def all_gather_json(value: Any, group: Group = None, device: torch.device = HOST) -> list[Any]:
    """Return the JSON value of each rank of the group, in their order, on all of them."""
    texts = all_gather_bytes(json.dumps(value).encode(), group, device)
    return [json.loads(text) for text in texts]


def gather_json(value: Any) -> list[Any]:
    """Return the value of each rank of the job on rank 0, and an empty list on the others."""
    sizes, padded = _gather_sizes(json.dumps(value).encode(), host_group(), HOST)
    buffers = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, buffers, dst=0, group=host_group())
    return [json.loads(_unpack_bytes(d[:n])) for d, n in zip(buffers or [], sizes, strict=False)]


def send_json(value: Any, to: int, group: Group, device: torch.device) -> None:
    """Send a value to one rank (of the whole job), which calls `receive_json`."""
    data = _pack_bytes(json.dumps(value).encode(), device)
    dist.send(_number(len(data), device), to, group=group)
    dist.send(data, to, group=group)


def receive_json(source: int, group: Group, device: torch.device) -> Any:
    """Receive the value that rank `source` (of the whole job) sends."""
    size = _number(0, device)
    dist.recv(size, source, group=group)
    data = _empty_bytes(int(size), device)
    dist.recv(data, source, group=group)
    return json.loads(_unpack_bytes(data))


def _gather_sizes(
    message: bytes, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], Tensor]:
    """Return the size of every rank's message, and this rank's message padded to the longest."""
    all_sizes = torch.empty(group.size(), dtype=torch.long, device=device)
    dist.all_gather([*all_sizes.split(1)], _number(len(message), device), group=group)
    sizes = all_sizes.tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(message)] = _pack_bytes(message, device)
    return sizes, padded


def _number(value: int, device: torch.device) -> Tensor:
    """Return a number as a tensor that is made on the device: a copy from the host would block."""
    return torch.full((1,), value, device=device)


def _pack_bytes(data: bytes | None, device: torch.device) -> Tensor:
    assert data, "an empty message"
    return to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def _empty_bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _unpack_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
