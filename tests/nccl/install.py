"""Replacement of torch's functions, so that a group that would use gloo is a communicator with the
rules of NCCL."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.nccl.group import Communicator
from tests.nccl.link import place

_OF_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def install() -> None:
    """Replace functions of torch in this process, once."""
    if hasattr(dist.Backend, "NCCL_RULES"):
        return
    dist.Backend.register_backend("nccl_rules", _create, extended_api=True, devices=["cpu"])
    helper = c10d._new_process_group_helper
    init, destroy = c10d.init_process_group, c10d.destroy_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        c10d._world.group_count = 0  # a world that a verdict kept from starting has left it at 1
        init("nccl_rules" if backend in ("gloo", None) else backend, *args, **kwargs)

    def new_process_group(size: int, rank: int, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks and (link := _link_of_world()) is not None:
            link.tell("new_group", ranks=sorted(ranks), where=place())
        return helper(size, rank, ranks, *args, **kwargs)

    def destroy_process_group(group: Any = None) -> None:
        link = _link_of_world()
        destroy(group)
        if link is not None and not dist.is_initialized():
            link.leave()

    c10d._new_process_group_helper = new_process_group
    _replace(init, init_process_group)
    _replace(c10d.batch_isend_irecv, _batch_isend_irecv)
    _replace(destroy, destroy_process_group)
    for name in _OF_OBJECTS:
        _replace(getattr(c10d, name), _reported(getattr(c10d, name)))


def _batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
    """Make a batch. torch makes one for objects of its own class only."""
    group: Any = ops[0].group or dist.group.WORLD
    group._start_coalescing(None)
    for op in ops:
        method = group.send if op.op is dist.isend else group.recv
        method([op.tensor], op.group_peer, op.tag)
    return [group._end_coalescing(None)]


def _create(options: Any, _: Any = None) -> Communicator:
    return Communicator(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group),
        str(options.group_id),
    )


def _link_of_world() -> Any:
    return getattr(dist.group.WORLD, "link", None)


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    for module in (c10d, dist):
        setattr(module, function.__name__, other)


def _reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Report a collective of pickled objects, if NCCL_RULES has `no-objects`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        link = _link_of_world()
        if link is not None and "no-objects" in os.environ["NCCL_RULES"]:
            link.tell("remark", text=f"OBJECTS: {function.__name__} pickles, at {place()}")
        return function(*args, **kwargs)

    return call
