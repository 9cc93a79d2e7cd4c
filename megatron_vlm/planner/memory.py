"""Memory that a rank of each stage needs, before anything is loaded.

Weights, gradients and optimizer state are exact. Activations are what autograd keeps for the
backward, on the device and on the host, and what is temporary. They are counted per token, patch
and supervised position, and checked against a real forward in tests/planner/test_memory.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_vlm.config.objectives import reference_of
from megatron_vlm.config.optimizer_spec import OFFLOAD_BUCKET, optimizer_spec
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import ParallelDims, count_offloaded, shards_optimizer
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import Attention, LayerSpec, fits_flash, mask_columns
from megatron_vlm.family.flash_attention import is_flash
from megatron_vlm.hf.block_weight import DECODED_AT_ONCE
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.log_probs import LOGITS_AT_ONCE
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.parameters import (
    ParamCounts,
    bytes_of_reward_model,
    count,
    largest_in_blocks,
)
from megatron_vlm.planner.row_sizes import BatchSizes

_FP32 = 4


def activations(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the bytes that the chunk at this place keeps on the device for a backward."""
    model, sizes, dims = layout.trained.model, layout.sizes, layout.dims
    hidden, tokens = sizes.text.hidden, batch.padded_tokens
    if place == 0 and _is_frozen(layout):
        at_end = _kept_of_head(layout, batch) + _kept_of_mtp_head(layout, batch)
        return at_end * layout.itemsize if dims.is_last(place) else 0
    kept = _values_of_layers(layout, place, batch, layer_values)
    values = sum(kept) + _mask_values(layout, place, batch)
    # Features that have not been added yet arrive with the hidden states, and the decoder's input.
    arriving = Carry.extras(sizes, dims, place - 1, bool(batch.patches), place > 0)
    if place > 0 or model.recompute == "full":
        values += tokens * hidden * arriving
    if place == 0:
        values += batch.patches_of_rank(dims.tp, model.share_images) * _patch_values(layout)
    if dims.is_last(place):
        norm = 1 if model.freeze_language else 2
        normed = batch.supervised if kept and sizes.text.ends_at_places else tokens
        values += norm * normed * hidden + _kept_of_head(layout, batch)
        values += _kept_of_mtp_head(layout, batch)
    return values * layout.itemsize - offloaded_activations(layout, place, batch)


def offloaded_activations(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the bytes that it keeps in the memory of the host instead."""
    kept, sizes = _offloaded_values(layout, place, batch), layout.sizes
    if not kept:
        return 0
    values, of_input = sum(kept), batch.padded_tokens * sizes.text.hidden
    if place > 0:  # the schedule keeps the input of a stage on the device
        values -= of_input
    elif layout.cfg.model.recompute == "full":
        values += of_input * Carry.extras(sizes, layout.dims, -1, bool(batch.patches), False)
    return values * layout.itemsize


def _offloaded_values(layout: ModelLayout, place: int, batch: BatchSizes) -> list[int]:
    """Return the values of each layer at this place that is offloaded."""
    share = layout.cfg.model.offload_activations
    if not share or (place == 0 and _is_frozen(layout)):
        return []
    values = _values_of_layers(layout, place, batch, layer_values)
    return values[: count_offloaded(share, len(values))]


def _mask_values(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the values of the masks of a micro-batch, which the layers at this place share."""
    kinds = {layout.sizes.text.kinds[kind].mixer for kind in _kinds_at(layout, place)}
    windows = {
        each.window
        for each in kinds
        if isinstance(each, Attention) and not _needs_no_mask(layout, each)
    } - {None}
    masks = sum(bool(batch.patches) or batch.tokens > each for each in windows if each)
    rows = batch.rows if batch.patches else 1  # rows of text have the same one
    return masks * rows * batch.tokens * mask_columns(batch.tokens)


def _needs_no_mask(layout: ModelLayout, attention: Attention) -> bool:
    """Return whether FlashAttention computes windows, which takes no mask: on a GPU in bf16."""
    kernel = layout.cfg.model.attention
    on_gpu = layout.cfg.platform != "cpu" and layout.itemsize < _FP32
    return on_gpu and fits_flash(attention.head_dim) and (kernel == "auto" or is_flash(kernel))


def _values_of_layers(
    layout: ModelLayout, place: int, batch: BatchSizes, values_of: "ValuesOf"
) -> list[int]:
    """Return the values of each layer at this place. A search asks for them thousands of times, so
    equal layers are computed once."""
    text = layout.sizes.text
    by_kind = [values_of(layout, kind, batch) for kind in text.kinds]
    values = [by_kind[kind] for kind in _kinds_at(layout, place)]
    if values and layout.dims.is_last(place) and text.ends_at_places:
        values[-1] = values_of(layout, text.layers[-1], batch, True)
    return values


def _kinds_at(layout: ModelLayout, place: int) -> tuple[int, ...]:
    """Return the kind of each layer at this place."""
    layers = layout.dims.layers_at(place)
    return layout.sizes.text.kind_of[layers.start : layers.stop]


def _is_frozen(layout: ModelLayout) -> bool:
    """Return whether only the head has adapters, so that nothing before it has a gradient."""
    return all(getattr(layout.trained.model, f"freeze_{part}") for part in SWITCHES)


def _kept_of_head(layout: ModelLayout, batch: BatchSizes) -> int:
    """Return the number of values: the input of the head, and the output of its adapter's A."""
    low = layout.cfg.lora.rank if layout.adapted.head else 0
    return batch.supervised * (layout.sizes.text.hidden + low)


def _kept_of_mtp_head(layout: ModelLayout, batch: BatchSizes) -> int:
    """Return the number of values that an MTP head keeps, 0 if it does not learn: of the
    norms and the product before its layer, of the layer, and of the norm and the model's head after
    it."""
    mtp, sizes = layout.sizes.mtp, layout.sizes
    if mtp is None or not sizes.trains_mtp:
        return 0
    layer = layer_values(layout.of_mtp_head, mtp.layer, batch)
    return layer + (4 * batch.padded_tokens + 3 * batch.supervised) * sizes.text.hidden


def working_bytes(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the maximum of temporary bytes: a recomputed layer or block, features before they
    enter the sequence, or logits. Two offloaded layers are on the device in addition: the one that
    computes, and the one that is copied."""
    model, sizes, dims, itemsize = layout.trained.model, layout.sizes, layout.dims, layout.itemsize
    text, tokens = sizes.text, batch.padded_tokens
    temporaries = [0]
    if model.recompute == "full":
        kept = _values_of_layers(layout, place, batch, kept_of_layer)
        temporaries.append(max(kept, default=0) * itemsize)
    if place == 0 and batch.patches:
        temporaries.append(tokens * text.hidden * sizes.vision.levels * itemsize)
        if model.recompute_vision and not model.freeze_vision:
            patches = batch.patches_of_rank(dims.tp, model.share_images)
            temporaries.append(patches * block_values(layout) * itemsize)
    if dims.is_last(place):
        # Logits, their fp32 copy and the gradient of one of the two exist together.
        logits = batch.supervised * dims.padded_vocab(text.vocab) // dims.tp
        # The model's probabilities stay while the MTP head makes its own.
        copies = 3 if sizes.trains_mtp else 2
        temporaries.append(min(logits, LOGITS_AT_ONCE) * (itemsize + copies * _FP32))
    largest = sorted(_offloaded_values(layout, place, batch), reverse=True)
    return max(temporaries) + sum(largest[:2]) * itemsize


def layer_values(
    layout: ModelLayout, layer: LayerSpec, batch: BatchSizes, at_places: bool = False
) -> int:
    """Return the number of values that a decoder layer keeps for its backward. `at_places`: its
    feed-forward network gets supervised tokens alone."""
    if layout.cfg.model.recompute == "full":
        return batch.padded_tokens * layout.sizes.text.hidden
    return kept_of_layer(layout, layer, batch, at_places)


def kept_of_layer(
    layout: ModelLayout, layer: LayerSpec, batch: BatchSizes, at_places: bool = False
) -> int:
    """Return the number of values that a layer keeps if nothing is recomputed."""
    cfg, hidden, tp = layout.trained, layout.sizes.text.hidden, layout.dims.tp
    is_frozen, learning = cfg.model.freeze_language, learns(cfg, "language")
    # The input of a frozen linear layer or norm is not needed again. Next to adapters, norms are
    # frozen.
    norms = 1 if is_frozen else 3 if learning else 2  # before the mixer and the other part
    norms += layer.post_norms // 2 * (2 if learning else 1)
    # The gradients of the experts' weights and adapters need the inputs of their layers.
    inputs = learning or layout.adapted.experts
    # recompute=selective saves nothing: torch's attention keeps no matrix of scores, and the next
    # layer keeps its output anyway.
    of_mixer = norms * hidden + layer.mixer.kept_values(learning) // tp
    of_ffn = norms * hidden + layer.ffn.kept_values(hidden, is_frozen, inputs, tp)
    tokens = batch.padded_tokens
    return tokens * of_mixer + (batch.supervised if at_places else tokens) * of_ffn


ValuesOf = Callable[..., int]  # layer_values or kept_of_layer


def _patch_values(layout: ModelLayout) -> int:
    """Return the number of values per patch that the vision tower keeps for its backward."""
    vision, model = layout.sizes.vision, layout.trained.model
    if model.freeze_vision:  # nothing before the mergers has a gradient
        return 0 if model.freeze_merger else vision.merger_values
    block = vision.hidden if model.recompute_vision else block_values(layout)
    return vision.patch_values + vision.depth * block + vision.merger_values


def block_values(layout: ModelLayout) -> int:
    """Return the number of values per patch that one block of the tower keeps. One in fp32 counts
    as often as it fits into a weight."""
    vision = layout.sizes.vision
    return vision.block_values + vision.fp32_values * _FP32 // layout.itemsize


USABLE = 0.9  # fraction of a device's memory; the rest is for kernels' workspaces and fragmentation
_GIB = 2**30


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one rank of a stage needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward of all micro-batches in flight
    working: int = 0  # temporary within one micro-batch
    host: int = 0  # in the memory of the host instead
    nccl: int = 0  # in the buffers of communicators

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.fixed + self.activations + self.working + self.nccl

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the data."""
        return self.weights + self.gradients + self.optimizer


def estimate(layout: ModelLayout, batches: Sequence[BatchSizes]) -> list[StageMemory]:
    """Return the estimate of each stage. `batches`: micro-batches of a step on a replica."""
    return [stage_memory(layout, stage, batches) for stage in range(layout.dims.pp)]


def stage_memory(layout: ModelLayout, stage: int, batches: Sequence[BatchSizes]) -> StageMemory:
    """Return the estimate of one stage."""
    cfg, dims, counts = layout.cfg, layout.dims, count(layout, stage)
    optimizer, host = _optimizer_memory(layout, counts)
    kept_by_chunk, host_by_chunk, working, distinct = [], [], [], set(batches)
    for chunk in range(dims.virtual_stages):
        place = dims.place_of(stage, chunk)
        kept = {each: activations(layout, place, each) for each in distinct}
        on_host = {each: offloaded_activations(layout, place, each) for each in distinct}
        kept_by_chunk.append([kept[each] for each in batches])
        host_by_chunk.append([on_host[each] for each in batches])
        working += [working_bytes(layout, place, each) for each in distinct]
    in_flight = micro_batches_in_flight(dims, stage, len(batches))
    models = 2 if reference_of(cfg) == "model" else 1  # the second one is frozen
    return StageMemory(
        counts.weight_bytes(cfg.lora.base, layout.itemsize) * models
        + bytes_of_reward_model(layout, stage),
        _FP32 * counts.gradients,
        optimizer,
        _peak(kept_by_chunk, in_flight),
        max(working, default=0) + _decoded_bytes(layout),
        host + _peak(host_by_chunk, in_flight),
        communicators(layout, stage) * _COMMUNICATOR if layout.on_gpus else 0,
    )


# Assumed: 544 to 688 MB on A100s with NVLink (NVIDIA/nccl issue 964), and 3.5 times less since NCCL
# 2.22, which connects only what is used.
_COMMUNICATOR = 200 * 2**20


def communicators(layout: ModelLayout, stage: int) -> int:
    """Return how many communicators carry operations of a rank of this stage while it trains."""
    dims, cfg, is_last = layout.dims, layout.cfg, stage == layout.dims.pp - 1
    has_shards = shards_optimizer(cfg.parallel, dims.dp)
    norm = dims.world_size if has_shards or dims.ep > 1 else dims.tp * dims.pp
    muon = dims.tp * dims.dp if optimizer_spec(cfg.optim).matrix_state_names else 1
    experts = dims.dp // dims.ep if dims.ep > 1 else 1
    embedding = dims.pp ** (layout.sizes.tied and (is_last or not stage))
    # Gradients are reduced in another group of the replicas than losses and counts of tokens.
    sizes = (dims.tp, dims.dp, dims.dp, norm, dims.pp, dims.pp, embedding, dims.ep, experts, muon)
    return sum(size > 1 for size in sizes)


def _optimizer_memory(layout: ModelLayout, counts: ParamCounts) -> tuple[int, int]:
    """Return the bytes of a rank's fp32 main weights and states, on the device and on the host.
    Weights of the model in fp32 are their own main weights, unless those are on the host."""
    optim, itemsize = layout.cfg.optim, layout.itemsize
    on_host = math.ceil(optim.offload * counts.optimized)
    states = optimizer_spec(optim).bytes_of_state * counts.states
    main_bytes = 0 if itemsize == _FP32 else _FP32
    buckets = 2 * min(on_host, OFFLOAD_BUCKET) * (_FP32 + itemsize)  # gradients and weights
    return (
        int(main_bytes * (counts.optimized - on_host) + (1 - optim.offload) * states),
        int(_FP32 * on_host + optim.offload * states) + buckets,
    )


def _peak(bytes_by_chunk: Sequence[Sequence[int]], in_flight: set[tuple[int, ...]]) -> int:
    """Return the maximum of bytes for micro-batches in flight, if the largest ones meet."""
    largest = [sorted(each, reverse=True) for each in bytes_by_chunk]
    return max(
        sum(sum(each[:number]) for each, number in zip(largest, numbers, strict=True))
        for numbers in in_flight
    )


def _decoded_bytes(layout: ModelLayout) -> int:
    """Return the temporary bytes of a product with a weight of lora.base: its values, and the fp32
    values and numbers of the codes of a part of it."""
    values = largest_in_blocks(layout)
    return values * layout.itemsize + min(values, DECODED_AT_ONCE) * (_FP32 + _FP32 // 2)


def micro_batches_in_flight(dims: ParallelDims, stage: int, batches: int) -> set[tuple[int, ...]]:
    """Return the numbers of micro-batches that the chunks of a stage keep at once, at each point
    where Megatron's schedule turns from a forward to a backward."""
    pp, chunks = dims.pp, dims.virtual_stages
    # Groups of pp micro-batches each pass all chunks. Fillers complete the last group.
    order = [chunk for _ in range(-(-batches // pp)) for chunk in range(chunks) for _ in range(pp)]
    back = [chunks - 1 - chunk for chunk in order]
    ahead = pp - stage - 1  # forwards before the first backward
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * pp
    in_flight_by_point = set()
    for done in range(max(min(len(order) - ahead, 2 * pp * chunks), 1)):
        started, finished = order[: ahead + done + 1], back[:done]
        kept = (started.count(chunk) - finished.count(chunk) for chunk in range(chunks))
        in_flight_by_point.add(tuple(kept))
    return in_flight_by_point


def host_need(dims: ParallelDims, stages: Sequence[StageMemory], devices: int) -> int:
    """Return the bytes of the ranks of the fullest machine, which has so many neighbouring ones."""
    of_rank = [stages[dims.stage_of(rank)].host for rank in range(dims.world_size)]
    return max(sum(of_rank[first:][:devices]) for first in range(0, len(of_rank), devices))


def check_offload(layout: ModelLayout, devices: int, memory: float) -> None:
    """Refuse an offloaded optimizer that needs more than the memory of a machine with `devices`."""
    offload, dims = layout.cfg.optim.offload, layout.dims
    if not offload:
        return
    need = host_need(dims, estimate(layout, []), devices)
    if need > USABLE * memory:
        ranks = min(devices, dims.world_size)
        raise ConfigError(
            f": main weights and moments of {ranks} rank{'s' * (ranks > 1)} need "
            f"{need / _GIB:,.1f} GiB of host memory, and {USABLE:.0%} of the {memory / _GIB:,.1f} "
            "GiB of their machine can be used",
            key="optim.offload",
            found=offload,
            remedy="lower it, set optim.states=int8, or use more machines with "
            "parallel.distributed_optimizer=true",
        )
