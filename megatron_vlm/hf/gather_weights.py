"""Weights of all ranks under Hugging Face's names, gathered one tensor at a time: for the files of
an export, an adapter or a comparison (`gather_tensors`), and for an engine (`stored_tensors`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import receive_json, send_json
from megatron_vlm.distributed.grid import GroupAxis, RankGroups
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint
from megatron_vlm.hf.weight_map import Entry, Origin

_DTYPE_OF = {str(dtype): dtype for dtype in FLOATS.values()}


def gather_tensors(
    held: Mapping[Entry, nn.Parameter],
    table: Sequence[Entry],
    grid: RankGroups,
    value_of: Callable[[nn.Parameter], Tensor] = lambda param: param.data,
    of: Callable[[Entry], bool] = lambda entry: entry.origin is Origin.hub,
    on_host: bool = True,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every tensor of a Hugging Face checkpoint, one at a time. The first rank of each
    replica gets its value, on the host or on its device, and the others get None. `of` chooses
    other entries. This is a collective: all ranks iterate."""
    stage = grid.pp.rank
    device = next(iter(held.values())).device
    for entry in table:
        if not of(entry):
            continue
        tensors: list[Tensor] = []
        if stage == entry.stage:
            value = value_of(held[entry]).detach().contiguous()
            parts = grid.gather(entry.layout.shard_group, value)
            tensors = entry.layout.save(parts) if grid.tp.rank == 0 else []
        if entry.stage != 0 and grid.tp.rank == 0 and stage in (0, entry.stage):
            tensors = _send_to_first(tensors, entry.stage, grid.pp, device)
        for index, name in enumerate(entry.names):
            if not grid.leads:
                yield name, None
            else:
                yield name, tensors[index].cpu() if on_host else tensors[index]


def write_gathered(
    held: Mapping[Entry, nn.Parameter],
    table: Sequence[Entry],
    grid: RankGroups,
    write: Callable[[Iterator[tuple[str, Tensor | None]]], None],
    of: Callable[[Entry], bool] = lambda entry: entry.origin is Origin.hub,
) -> None:
    """Call `write` on global rank 0 with the tensors of `gather_tensors`. This is a collective."""
    # The replicas that share experts with the first one send their tensors.
    named = gather_tensors(held, table, grid, of=of) if grid.edp.rank == 0 else iter(())
    with fail_together(CheckpointError):
        try:
            if grid.dp.rank == 0 and grid.leads:
                write(named)
        finally:
            for _ in named:  # the other ranks send their tensors even if writing the files failed
                pass


def stored_tensors(
    held: Mapping[Entry, nn.Parameter],
    source: HFCheckpoint,
    table: Sequence[Entry],
    grid: RankGroups,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as `export_hf` writes it, by its name and in its dtype in `source`, one at
    a time, on the device of global rank 0, and nothing on the other ranks. This is a collective:
    all ranks iterate to the end."""
    named = gather_tensors(held, table, grid, on_host=False) if grid.edp.rank == 0 else iter(())
    is_first = grid.dp.rank == 0 and grid.leads
    for name, tensor in named:
        if tensor is not None and is_first:
            for stored_name, value in source.as_stored(name, tensor):
                yield stored_name, value.to(FLOATS[source.tensors[stored_name].dtype])
    if is_first:
        yield from source.read_passthrough()


def _send_to_first(
    tensors: list[Tensor], source: int, stages: GroupAxis, device: torch.device
) -> list[Tensor]:
    """Send an entry's tensors from the stage that holds them to stage 0."""
    ranks, group = dist.get_process_group_ranks(stages.group), stages.group
    if stages.rank == source:
        shapes = [(tensor.shape, str(tensor.dtype)) for tensor in tensors]
        send_json(shapes, ranks[0], group, device)
        for tensor in tensors:
            dist.send(tensor.contiguous(), ranks[0], group=group)
        return tensors
    result = [
        torch.empty(shape, dtype=_DTYPE_OF[name], device=device)
        for shape, name in receive_json(ranks[source], group, device)
    ]
    for tensor in result:
        dist.recv(tensor, ranks[source], group=group)
    return result
