"""Parameters that a rank of each stage holds, and the optimizer state of its share."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby

from megatron_vlm.config.evaluation_checks import reward_model_of
from megatron_vlm.config.lora_base_types import BaseType, base_bytes
from megatron_vlm.config.optimizer_spec import optimizer_spec
from megatron_vlm.config.schema import Config, LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from megatron_vlm.config.trainable import SWITCHES
from megatron_vlm.distributed.dims import ParallelDims, overlaps, shards_optimizer
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import ModelSizes, Part
from megatron_vlm.hf.matrices import is_of_matrices, matrices_of
from megatron_vlm.hf.weight_map import MTP_PREFIX, Entry, Origin, name_table
from megatron_vlm.lora.targets import adapted_linears, adapted_specs, adapter_entries, find_misfit
from megatron_vlm.planner.layout import ModelLayout

# These constants come from megatron-core 0.16.1, _ParamAndGradBuffer and
# DistributedDataParallel.
_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_MIN_BUCKET = 40_000_000
_BUCKET_OF_RANK = 1_000_000


@dataclass(frozen=True)
class RankParam:
    """Parameter of a rank."""

    values: int
    trained: bool
    shared: bool = False  # the tied embedding, if both the first and the last stage have it
    expert: bool = False  # belongs to experts that the replicas divide
    states: int = 0  # states of the optimizer for each value
    muon_flops: int = 0  # operations of Newton-Schulz, over all ranks of TP and DP
    in_blocks: bool = False  # stored as codes, lora.base


@dataclass(frozen=True)
class ParamCounts:
    """Number of values on one rank of a stage. For what DP shards, it is the rank with the most."""

    held: int
    trained: int
    gradients: int  # size of the gradient buffer, alignment included
    optimized: int  # values that this rank's optimizer updates
    of_experts: int = 0  # the part of the gradients that is summed only over DP / EP ranks
    states: int = 0  # values of the optimizer's states on this rank
    muon_flops: int = 0  # operations of Newton-Schulz on this rank
    in_blocks: int = 0  # the part of what is held that lora.base stores as codes

    @property
    def muon_values(self) -> int:
        """Values whose updates Muon sends to other ranks and back: those with one state."""
        return max(0, 2 * self.optimized - self.states)

    def weight_bytes(self, base: BaseType | None, itemsize: int) -> int:
        """Return the bytes of all weights that the rank holds."""
        plain = itemsize * (self.held - self.in_blocks)
        return plain if base is None else plain + round(base_bytes(base) * self.in_blocks)


def count(layout: ModelLayout, stage: int) -> ParamCounts:
    """Count the values of each kind on a rank of a stage, over all its chunks."""
    # The arguments are reduced to what the numbers depend on, because a search meets the same
    # chunks again and again.
    cfg, dims = layout.cfg, layout.dims
    freeze = {f"freeze_{part}": getattr(cfg.model, f"freeze_{part}") for part in SWITCHES}
    freeze["mtp"] = cfg.model.mtp
    parallel = ParallelConfig(
        overlap_grad_reduce=overlaps(cfg.parallel, dims.dp)[0],
        distributed_optimizer=cfg.parallel.distributed_optimizer,
    )
    optim = OptimConfig(name=cfg.optim.name, muon=cfg.optim.muon)
    fixed = ModelConfig(path="", **freeze), cfg.lora, parallel, optim, layout.sizes
    places = [dims.place_of(stage, chunk) for chunk in range(dims.virtual_stages)]
    short = [_shortest_pipeline(layout, place) for place in places]
    chunks = [vars(_of_chunk(*fixed, *each)).values() for each in short]
    return ParamCounts(*map(sum, zip(*chunks, strict=True)))


def bytes_of_reward_model(layout: ModelLayout, stage: int) -> int:
    """Return the bytes of a rank's weights of rl.reward=model:FOLDER. It has the degrees of the
    trained model, and an even share of its own layers on each stage."""
    if (folder := reward_model_of(layout.cfg.rl)) is None:
        return 0
    sizes, of = _sizes_of_reward_model(folder), layout.dims
    parallel = ParallelConfig(tp=of.tp, pp=of.pp, ep=of.ep, virtual_stages=of.virtual_stages)
    dims = ParallelDims.create(parallel, of.world_size, sizes.text.num_layers)
    cfg = replace(layout.cfg, lora=LoraConfig())
    counts = count(replace(layout, cfg=cfg, sizes=sizes, dims=dims), stage)
    return counts.weight_bytes(None, layout.itemsize)


@lru_cache(maxsize=8)
def _sizes_of_reward_model(folder: str) -> ModelSizes:
    return read_sizes(folder, (), Part.score)


def _shortest_pipeline(layout: ModelLayout, place: int) -> tuple[ParallelDims, int]:
    """Return the shortest pipeline with a chunk like the one at this place, and its place there."""
    dims = layout.dims
    layers = dims.layers_per_stage
    layers_are_alike = not layout.cfg.lora.rank and len(layout.sizes.text.kinds) == 1
    before = [0 if layers_are_alike else sum(layers[:place])] * (place > 0)
    short = (*before, layers[place], *[0] * (not dims.is_last(place)))
    shortest = replace(dims, pp=len(short), layers_per_stage=short, virtual_stages=1)
    return shortest, len(before)


@lru_cache(maxsize=8192)
def _of_chunk(
    model: ModelConfig,
    lora: LoraConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    sizes: ModelSizes,
    dims: ParallelDims,
    place: int,
) -> ParamCounts:
    cfg = Config(model=model, lora=lora, parallel=parallel, optim=optim)
    params = _params(cfg, sizes, dims, place)
    trained = [param for param in params if param.trained]
    values = sum(param.values for param in trained)
    held = sum(param.values for param in params)
    in_blocks = sum(param.values for param in params if param.in_blocks)
    muon_flops = sum(param.muon_flops for param in trained) // (dims.tp * dims.dp)
    if not shards_optimizer(cfg.parallel, dims.dp):
        shared = sum(param.values for param in trained if param.expert)
        states = sum(param.values * param.states for param in trained)
        return ParamCounts(held, values, values, values, shared, states, muon_flops, in_blocks)
    bucket = None  # megatron cuts the buffer only for what is reduced early, on the first stage
    if cfg.parallel.overlap_grad_reduce and place == 0:
        bucket = max(_MIN_BUCKET, _BUCKET_OF_RANK * dims.dp)
    dense = _shards([param for param in trained if not param.expert], dims.dp, bucket)
    experts = _shards([param for param in trained if param.expert], dims.dp // dims.ep, bucket)
    buffer, optimized, states = (a + b for a, b in zip(dense, experts, strict=True))
    return ParamCounts(held, values, buffer, optimized, experts[0], states, muon_flops, in_blocks)


def _params(cfg: Config, sizes: ModelSizes, dims: ParallelDims, stage: int) -> list[RankParam]:
    """Return every parameter of one rank of a stage, in the order of the built module."""
    layers, is_last = dims.layers_of(stage), stage == dims.pp - 1
    spec = optimizer_spec(cfg.optim)
    of_others = len(spec.state_names)
    of_matrices = len(spec.matrix_state_names) or of_others
    return [
        RankParam(
            entry.values_per_rank(dims),
            not entry.is_frozen(cfg),
            shared=sizes.tied and dims.pp > 1 and entry.names == (sizes.names.embedding,),
            expert=entry.layout.shard_group == "ep" and dims.ep > 1,
            states=of_matrices if is_of_matrices(entry.hf_tensors[0]) else of_others,
            muon_flops=_muon_flops(cfg.optim, entry),
            in_blocks=entry.is_in_blocks(cfg.lora),
        )
        for layer, entry in _table(sizes, cfg.lora.rank, cfg.lora.targets)
        if (layer in layers if layer is not None else is_last if entry.stage else stage == 0)
        and (dims.pp > 1 or entry.origin is not Origin.copy)
    ]


def _muon_flops(optim: OptimConfig, entry: Entry) -> int:
    """Return the operations of Newton-Schulz for an entry's matrices, 0 without Muon."""
    if not optimizer_spec(optim).matrix_state_names or not is_of_matrices(entry.hf_tensors[0]):
        return 0
    first_expert = range(1)
    return sum(
        tensor.num_values // (matrix.rows * matrix.columns) * flops
        for tensor in entry.hf_tensors
        for matrix in matrices_of(tensor, first_expert)[:1]
        for flops in [matrix.orthogonalize_flops(optim.muon.ns_steps)]
    )


def largest_in_blocks(layout: ModelLayout) -> int:
    """Return the values of the largest weight stored as codes: a product needs all of them."""
    lora, dims = layout.cfg.lora, layout.dims
    return 0 if lora.base is None else _largest_in_blocks(layout.sizes, lora, dims.tp, dims.ep)


@lru_cache(maxsize=64)
def _largest_in_blocks(sizes: ModelSizes, lora: LoraConfig, tp: int, ep: int) -> int:
    dims = ParallelDims(tp, 1, ep, ep, (sizes.text.num_layers,))
    table = [entry for _, entry in _table(sizes, lora.rank, lora.targets)]
    return max(each.values_per_rank(dims) for each in table if each.is_in_blocks(lora))


def fits_blocks(cfg: Config, sizes: ModelSizes, tp: int) -> bool:
    """Return whether TP cuts no weight inside a block of lora.base."""
    if cfg.lora.base is None:
        return True
    table = [entry for _, entry in _table(sizes, cfg.lora.rank, cfg.lora.targets)]
    return find_misfit(cfg.lora, table, tp) is None


@lru_cache(maxsize=8)
def _table(
    sizes: ModelSizes, rank: int, targets: tuple[str, ...]
) -> list[tuple[int | None, Entry]]:
    """Return the table of names with the adapters, each entry with the number of its decoder layer,
    in the order of the built module. It is that of a pipeline of two stages, whose second stage has
    only the head. A search counts many splits of the layers, and all of them select from it."""
    table = name_table(sizes, "torch", ParallelDims(1, 2, 1, 1, (sizes.text.num_layers, 0)))
    if rank:
        linears = adapted_linears(table, adapted_specs(sizes.with_head, targets))
        table += adapter_entries(linears, rank)
    positions: dict[str, int] = {}  # place of each module's first entry in the table

    def order(entry: Entry) -> list[tuple[bool, bool, bool, int]]:
        # The tower and an MTP head are made last, and the output of attention before its
        # inputs.
        return [
            (
                module == MTP_PREFIX.rstrip("."),
                module == "vision_model",
                not module.endswith(".linear_proj"),
                positions.setdefault(module, len(positions)),
            )
            for module in accumulate(entry.our_name.split("."), "{}.{}".format)
        ]

    return [(_layer_of(entry), entry) for entry in sorted(table, key=order)]


def _layer_of(entry: Entry) -> int | None:
    is_of_layer = entry.our_name.startswith("decoder.layers.")
    return int(entry.our_name.split(".")[2]) if is_of_layer else None


def _shards(
    params: Sequence[RankParam], ranks: int, bucket_size: int | None
) -> tuple[int, int, int]:
    """Return the values of the gradient buffer, and the most values of parameters and of states in
    a rank's share of it. Each bucket is cut into equal shares."""
    start, values_by_rank, states_by_rank = 0, [0] * ranks, [0] * ranks
    for _, bucket in groupby(_buckets(params, bucket_size), key=lambda placed: placed[0]):
        spans = [(first, param) for _, first, param in bucket]
        end = spans[-1][0] + spans[-1][1].values
        size = _round_up(end, math.lcm(ranks, _BUCKET_ALIGNMENT))
        share = size // ranks
        for first, param in spans:
            end = first + param.values
            for rank in range(first // share, (end - 1) // share + 1):
                low, high = rank * share, (rank + 1) * share
                values = min(end, high) - max(first, low)
                values_by_rank[rank] += values
                states_by_rank[rank] += values * param.states
        start += size
    return start, max(values_by_rank), max(states_by_rank)


def _buckets(params: Sequence[RankParam], size: int | None) -> Iterator[tuple[int, int, RankParam]]:
    """Yield each parameter with its bucket and its place in it, in the order of the buffer, which
    is reversed. The shared embedding has its own bucket."""
    number = place = 0
    for param in reversed(params):
        place = _round_up(place, _PARAM_ALIGNMENT)
        if param.shared and place:
            number, place = number + 1, 0
        yield number, place, param
        place += param.values
        if param.shared or (size is not None and place >= size):
            number, place = number + 1, 0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
