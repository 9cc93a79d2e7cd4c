"""Expert routing of tokens, as batches specify it and as it is returned.

Shapes: S tokens of a row, T tokens of all rows of a micro-batch, L decoder layers with experts, K
experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import TextSizes
from megatron_vlm.model.experts import expert_mlps
from megatron_vlm.model.stage_model import StageModel

Chosen = tuple[int, Mapping[int, Tensor]]  # number of a micro-batch, and its experts by layer


def check_routing(batches: Sequence[MicroBatch], text: TextSizes) -> None:
    """Refuse a routing of micro-batches that the model cannot follow."""
    for place, batch in enumerate(batches):
        if (routing_TLK := batch.columns.get("routing")) is not None:
            check_table(routing_TLK, sum(batch.lengths), text, f"micro-batch {place}")


def check_table(routing_TLK: Tensor, tokens: int, text: TextSizes, place: str) -> None:
    """Refuse a routing of this number of tokens that the model cannot follow: a rank would wait for
    tokens of other ranks, or give a token the same expert twice."""
    experts = text.experts
    if experts is None:
        raise DataError(": the model has no experts", key="routing", remedy="give none")
    shape = (tokens, len(text.expert_layers), experts.top_k)
    if tuple(routing_TLK.shape) != shape:
        raise DataError(
            "does not fit the model",
            place=place,
            key="routing.shape",
            found=tuple(routing_TLK.shape),
            allowed=f"{list(shape)}: tokens, layers with experts, experts per token",
        )
    ordered_TLK = routing_TLK.sort(dim=-1).values
    valid = (ordered_TLK[..., 0] >= 0) & (ordered_TLK[..., -1] < experts.count)
    valid &= (ordered_TLK.diff(dim=-1) > 0).all(-1)
    if (invalid := (~(valid | (ordered_TLK == -1).all(-1))).nonzero()).numel():
        token, layer = invalid[0].tolist()
        raise DataError(
            place=f"{place}: token {token} in layer {text.expert_layers[layer]}",
            key="routing",
            found=routing_TLK[token, layer].tolist(),
            allowed=f"different experts from 0 to {experts.count - 1}, or -1 for all of them",
        )


def given_routing(
    batch: MicroBatch, chunk: StageModel, move: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Return the routing that a micro-batch specifies for this chunk's layers, by layer number."""
    routing_TLK, expert_layers = batch.columns.get("routing"), chunk.sizes.text.expert_layers
    if routing_TLK is None:
        return {}
    place = {number: index for index, number in enumerate(expert_layers)}
    local_layers = [mlp.layer for mlp in expert_mlps([chunk])]
    return {number: move(routing_TLK[:, place[number - 1]].contiguous()) for number in local_layers}


def routing_tables(
    batches: Sequence[MicroBatch],
    chosen: Sequence[Chosen],
    text: TextSizes,
    grid: RankGroups,
    device: torch.device,
) -> list[Tensor]:
    """Return the routing [T, L, K] of each micro-batch, on the host of every rank of a replica,
    from the choices of each stage's routers. A collective."""
    experts = text.experts
    assert experts is not None
    order, tables = text.expert_layers, []
    for batch in batches:
        shape = (sum(batch.lengths), len(order), experts.top_k)
        tables.append(torch.zeros(shape, dtype=torch.int32, device=device))
    for number, layers in chosen:
        for layer, chosen_TK in layers.items() if number < len(batches) else ():
            tables[number][:, order.index(layer - 1)] = chosen_TK.int()
    for table_TLK in tables:
        dist.all_reduce(table_TLK, group=grid.pp.group)  # a stage has zeros for other layers
    return [table_TLK.cpu() for table_TLK in tables]


# The balance of a step's tokens over the experts.
#
# Shapes: L decoder layers, E experts.


def take_counts(
    chunks: Sequence[StageModel], text: TextSizes, device: torch.device
) -> DeferredFigures | None:
    """Return counts of the global batch, or None for a dense model: the tokens that each expert of
    each layer got [L, E], the tokens and layers with a given routing, and how many of these the
    router would have routed to other experts. The counts restart at 0. A collective."""
    if text.experts is None:
        return None
    size = text.num_layers * text.experts.count
    total = torch.zeros(size + 2, dtype=torch.float64, device=device)
    for mlp in expert_mlps(chunks):
        total[:size].view(text.num_layers, -1)[mlp.layer - 1] = mlp.load
        total[size:] += mlp.rerouted
    begin_count(chunks)
    dist.all_reduce(total)
    return DeferredFigures(total)


def load_of(counts: DeferredFigures, text: TextSizes) -> Tensor:
    """Return the tokens of each expert of each layer with experts."""
    load_LE = torch.tensor(counts.values[:-2], dtype=torch.float64).view(text.num_layers, -1)
    return load_LE[list(text.expert_layers)]


def routing_means(counts: DeferredFigures, text: TextSizes) -> dict[str, float]:
    """Return the load of the busiest expert and, where a routing was given, the share of the tokens
    and layers for which the router would have chosen other experts."""
    means = {"expert_load": busiest_expert_ratio(load_of(counts, text))}
    given, rerouted = counts.values[-2:]
    return means | ({"rerouted": rerouted / given} if given else {})


def begin_count(chunks: Sequence[StageModel]) -> None:
    """Reset the token counts to 0."""
    for mlp in expert_mlps(chunks):
        mlp.load = mlp.rerouted = 0


def busiest_expert_ratio(load_LE: Tensor) -> float:
    """Return the tokens of the busiest expert over the mean, in the layer where that is highest."""
    return float((load_LE.amax(1) / load_LE.mean(1)).amax())
