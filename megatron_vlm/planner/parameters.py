"""Parameters that a rank of each stage holds, and the optimizer state of its share."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod

from megatron_vlm.config.schema import Config, LoraConfig, ModelConfig, ParallelConfig
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes, Part, TextSizes
from megatron_vlm.lora.targets import adapted_specs, module_of

# These constants are those of megatron-core 0.16.1, _ParamAndGradBuffer and
# DistributedDataParallel.
_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_MIN_BUCKET = 40_000_000
_BUCKET_OF_RANK = 1_000_000
_CUT_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class RankParam:
    """Parameter of a rank."""

    values: int
    trained: bool
    shared: bool = False  # the tied embedding, if both the first and the last stage have it
    expert: bool = False  # belongs to experts that the replicas divide


@dataclass(frozen=True)
class ParamCounts:
    """Number of values on one rank of a stage. For what DP shards, it is the rank with the most."""

    held: int
    trained: int
    gradients: int  # size of the gradient buffer, alignment included
    optimized: int  # values whose moments this rank keeps
    of_experts: int = 0  # the part of the gradients that is summed only over DP / EP ranks


def count(cfg: Config, sizes: ModelSizes, dims: ParallelDims, stage: int) -> ParamCounts:
    """Count the values of each kind on a rank of a stage, over all its chunks."""
    # The arguments are reduced to what the numbers depend on, because a search meets the same
    # chunks again and again.
    freeze, optimizer = [f"freeze_{part}" for part in SWITCHES], ["overlap_grad_reduce"]
    optimizer += ["distributed_optimizer"]
    model = ModelConfig(path="", **{key: getattr(cfg.model, key) for key in freeze})
    parallel = ParallelConfig(**{key: getattr(cfg.parallel, key) for key in optimizer})
    places = [dims.place_of(stage, chunk) for chunk in range(dims.virtual_stages)]
    short = [_shortest_pipeline(cfg, sizes, dims, place) for place in places]
    chunks = [astuple(_of_chunk(model, cfg.lora, parallel, sizes, *each)) for each in short]
    return ParamCounts(*map(sum, zip(*chunks, strict=True)))


def _shortest_pipeline(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, place: int
) -> tuple[ParallelDims, int]:
    """Return the shortest pipeline that has a chunk like the one at this place, and its place
    there."""
    layers, experts = dims.layers_per_stage, sizes.text.experts
    layers_are_alike = not cfg.lora.rank and (
        experts is None or len(experts.layers) == sizes.text.layers
    )
    before = [0 if layers_are_alike else sum(layers[:place])] * (place > 0)
    short = (*before, layers[place], *[0] * (not dims.is_last(place)))
    shortest = replace(dims, pp=len(short), layers_per_stage=short, virtual_stages=1)
    return shortest, len(before)


@lru_cache(maxsize=8192)
def _of_chunk(
    model: ModelConfig,
    lora: LoraConfig,
    parallel: ParallelConfig,
    sizes: ModelSizes,
    dims: ParallelDims,
    place: int,
) -> ParamCounts:
    cfg = Config(model=model, lora=lora, parallel=parallel)
    params = list(chunk_params(cfg, sizes, dims, place))
    trained = [param for param in params if param.trained]
    values = sum(param.values for param in trained)
    held = sum(param.values for param in params)
    if not cfg.parallel.distributed_optimizer or dims.dp == 1:
        shared = sum(param.values for param in trained if param.expert)
        return ParamCounts(held, values, values, values, shared)
    bucket = None  # megatron cuts the buffer only for what is reduced early, on the first stage
    if cfg.parallel.overlap_grad_reduce and place == 0:
        bucket = max(_MIN_BUCKET, _BUCKET_OF_RANK * dims.dp)
    dense = _shards([param for param in trained if not param.expert], dims.dp, bucket)
    experts = _shards([param for param in trained if param.expert], dims.dp // dims.ep, bucket)
    buffer, optimized = (a + b for a, b in zip(dense, experts, strict=True))
    return ParamCounts(held, values, buffer, optimized, experts[0])


def chunk_params(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, place: int
) -> Iterator[RankParam]:
    """Yield every parameter of one rank in the chunk at a place in the pipeline, in the order of
    the built module."""
    text, tp, language = sizes.text, dims.tp, learns(cfg, "language")
    first, last = place == 0, dims.is_last(place)
    adapters = _adapters(cfg, sizes, dims)
    vocabulary = RankParam(
        dims.padded_vocab(text.vocab) // tp * text.hidden,
        language,
        shared=sizes.tied and dims.pp > 1,
    )
    if first:
        yield vocabulary
    chunk, stage = divmod(place, dims.pp)
    for number in dims.layers_of(stage, chunk):
        for values, modules, expert in _layer(text, dims, number):
            yield RankParam(values, language, expert=expert)
            for module in modules:
                yield from adapters.get(f"layers.{number}.{module}", ())
    if last:
        yield RankParam(text.hidden, language)  # the final norm
        if not sizes.tied or dims.pp > 1:
            yield vocabulary
        yield from adapters.get(module_of(sizes.head), ())
    if first:
        yield from _tower(cfg, sizes, adapters)


def _layer(
    text: TextSizes, dims: ParallelDims, number: int
) -> Iterator[tuple[int, tuple[str, ...], bool]]:
    """Yield the values of each parameter of a decoder layer on one rank, the Hugging Face linear
    layers in it, and whether it belongs to experts that the replicas divide."""
    tp, qkv = dims.tp, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield text.hidden, (), False
    yield text.hidden * text.query // tp, ("self_attn.o_proj",), False
    yield (text.query + 2 * text.kv) // tp * text.hidden, qkv, False
    yield from [(text.head_dim, (), False)] * 2
    yield text.hidden, (), False
    if text.experts is None or number not in text.experts.layers:
        yield 2 * text.ffn // tp * text.hidden, ("mlp.gate_proj", "mlp.up_proj"), False
        yield text.hidden * text.ffn // tp, ("mlp.down_proj",), False
        return
    yield text.experts.count * text.hidden, (), False  # the router
    expert_values = text.experts.count // dims.ep * text.experts.ffn * text.hidden
    for values, module in ((2 * expert_values, "gate_up_proj"), (expert_values, "down_proj")):
        yield values, (f"mlp.experts.{module}",), dims.ep > 1


def _tower(
    cfg: Config, sizes: ModelSizes, adapters: Mapping[str, tuple[RankParam, RankParam]]
) -> Iterator[RankParam]:
    for tensor in sizes.tensors:
        if tensor.part in (Part.vision, Part.merger):
            yield RankParam(tensor.num_values, learns(cfg, tensor.part.switch))
            if tensor.name.endswith(".bias"):  # adapters follow their layer's own parameters
                yield from adapters.get(tensor.name.removesuffix(".bias"), ())


def _adapters(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims
) -> dict[str, tuple[RankParam, RankParam]]:
    """Return A and B on one rank by module. The names of the decoder's modules begin with `layers`.
    TP cuts B where it cuts the weight's rows, and A where it cuts the columns. The replicas divide
    the adapters of experts."""
    adapters, rank = {}, cfg.lora.rank
    for weight in adapted_specs(sizes.with_head, cfg.lora.targets) if cfg.lora.rank else ():
        *count, rows, columns = weight.shape
        name = module_of(weight)
        if weight.part is Part.decoder:
            name = name[name.index("layers.") :]
            if name.endswith(_CUT_COLUMNS):
                columns //= dims.tp
            else:
                rows //= dims.tp
        elif weight.part is Part.head:
            rows = dims.padded_vocab(rows) // dims.tp
        experts = prod(count) // dims.ep if count else 1
        shared = bool(count) and dims.ep > 1
        adapters[name] = (
            RankParam(experts * rank * columns, True, expert=shared),
            RankParam(experts * rank * rows, True, expert=shared),
        )
    return adapters


def _shards(params: Sequence[RankParam], ranks: int, bucket_size: int | None) -> tuple[int, int]:
    """Return the values of the gradient buffer, and those of parameters in the fullest rank's share
    of it. Each bucket is cut into equal shares."""
    start, values_by_rank = 0, [0] * ranks
    for _, bucket in groupby(_buckets(params, bucket_size), key=lambda placed: placed[0]):
        spans = [(first, param.values) for _, first, param in bucket]
        size = _round_up(sum(spans[-1]), math.lcm(ranks, _BUCKET_ALIGNMENT))
        share = size // ranks
        for first, values in spans:
            for rank in range(first // share, (first + values - 1) // share + 1):
                low, high = rank * share, (rank + 1) * share
                values_by_rank[rank] += min(first + values, high) - max(first, low)
        start += size
    return start, max(values_by_rank)


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
