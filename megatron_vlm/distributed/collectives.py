"""Bytes and JSON between ranks, as tensors of bytes.

torch's own collectives for objects unpickle what arrives, and a pickle may run any program: whoever
could write to one connection of a job would own its machines. Here a message is read as what it
is. All functions are collectives of the group; `device` is this rank's.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.distributed.device import to_device

Group = dist.ProcessGroup | None  # None: all ranks


def broadcast_bytes(mine: bytes | None, source: int, group: Group, device: torch.device) -> bytes:
    """What rank `source` (of the whole job) gives, on every rank of the group."""
    given = mine if dist.get_rank() == source else None
    assert given is not None or dist.get_rank() != source
    size = _number(0 if given is None else len(given), device)
    dist.broadcast(size, source, group=group)
    count = int(size) if given is None else len(given)
    if not count:
        return b""
    data = _empty(count, device) if given is None else _packed(given, device)
    dist.broadcast(data, source, group=group)
    return _unpacked(data)


def broadcast_json(mine: Any, source: int, group: Group, device: torch.device) -> Any:
    """The same for what JSON can hold; tuples arrive as lists, also where they come from."""
    text = json.dumps(mine).encode() if dist.get_rank() == source else None
    return json.loads(broadcast_bytes(text, source, group, device))


def all_gather_bytes(mine: bytes, group: Group, device: torch.device) -> list[bytes]:
    """What each rank of the group gives, in their order, on all of them."""
    sizes, padded = _sized(mine, group, device)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [_unpacked(data[:size]) for data, size in zip(found, sizes, strict=True)]


def all_gather_json(mine: Any, group: Group, device: torch.device) -> list[Any]:
    """The same for what JSON can hold."""
    return [json.loads(text) for text in all_gather_bytes(json.dumps(mine).encode(), group, device)]


def gather_json(mine: Any, device: torch.device) -> list[Any]:
    """What each rank of the job gives, on rank 0; an empty list on the others."""
    sizes, padded = _sized(json.dumps(mine).encode(), None, device)
    found = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, found, dst=0)
    pairs = zip(found or [], sizes, strict=False)
    return [json.loads(_unpacked(data[:size])) for data, size in pairs]


def send_json(value: Any, to: int, group: Group, device: torch.device) -> None:
    """To one rank (of the whole job), which calls `receive_json`."""
    data = _packed(json.dumps(value).encode(), device)
    dist.send(_number(len(data), device), to, group=group)
    dist.send(data, to, group=group)


def receive_json(source: int, group: Group, device: torch.device) -> Any:
    """What rank `source` (of the whole job) sends."""
    size = _number(0, device)
    dist.recv(size, source, group=group)
    data = _empty(int(size), device)
    dist.recv(data, source, group=group)
    return json.loads(_unpacked(data))


def _sized(mine: bytes, group: Group, device: torch.device) -> tuple[list[int], Tensor]:
    """The size of every rank's message, and this rank's padded to the longest."""
    size = _number(len(mine), device)
    found = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, size, group=group)
    sizes = [int(each) for each in found]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = _packed(mine, device)
    return sizes, padded


def _number(value: int, device: torch.device) -> Tensor:
    """Made on the device: a copy from the host would be waited for."""
    return torch.full((1,), value, device=device)


def _packed(data: bytes | None, device: torch.device) -> Tensor:
    assert data, "an empty message"
    return to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _unpacked(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
