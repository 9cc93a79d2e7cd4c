"""Bytes of activations that a rank of a stage needs: what autograd keeps for the backward, on the
device and on the host, and what is temporary. They are counted per token, patch and supervised
position, and checked against a real forward in tests/planner/test_memory.py."""

from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import count_offloaded
from megatron_vlm.family.attention_limits import mask_columns
from megatron_vlm.family.decoder_layers import Attention, LayerSpec
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.log_probs import LOGITS_AT_ONCE
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.row_sizes import BatchSizes

_FP32 = 4


def activations(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the bytes that the chunk at this place keeps on the device for a backward."""
    model, sizes, dims = layout.trained.model, layout.sizes, layout.dims
    hidden, tokens = sizes.text.hidden, batch.padded_tokens
    if place == 0 and _is_frozen(layout):
        return _kept_of_head(layout, batch) * layout.itemsize if dims.is_last(place) else 0
    values = tokens * sum(_values_of_layers(layout, place)) + _mask_values(layout, place, batch)
    # Features that have not been added yet arrive with the hidden states.
    arriving = Carry.extras(sizes, dims, place - 1, bool(batch.patches))
    if place > 0 or model.recompute == "full":
        values += tokens * hidden * arriving
    if place == 0:
        values += batch.patches_of_rank(dims.tp, model.share_images) * _patch_values(layout)
    if dims.is_last(place):
        norm = 1 if model.freeze_language else 2
        values += norm * tokens * hidden + _kept_of_head(layout, batch)
    return values * layout.itemsize - offloaded_activations(layout, place, batch)


def offloaded_activations(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the bytes that it keeps in the memory of the host instead."""
    values, sizes = _offloaded_values(layout, place), layout.sizes
    if not values:
        return 0
    per_token = sum(values)
    if place > 0:  # the schedule keeps the input of a stage on the device
        per_token -= sizes.text.hidden
    elif layout.cfg.model.recompute == "full":
        per_token += sizes.text.hidden * Carry.extras(sizes, layout.dims, -1, bool(batch.patches))
    return batch.padded_tokens * per_token * layout.itemsize


def _offloaded_values(layout: ModelLayout, place: int) -> list[int]:
    """Return the values per token of each layer at this place that is offloaded."""
    share = layout.cfg.model.offload_activations
    if not share or (place == 0 and _is_frozen(layout)):
        return []
    values = _values_of_layers(layout, place)
    return values[: count_offloaded(share, len(values))]


def _mask_values(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the values of the masks of a micro-batch, which the layers at this place share."""
    kinds = {layout.sizes.text.kinds[kind].mixer for kind in _kinds_at(layout, place)}
    windows = {each.window for each in kinds if isinstance(each, Attention)} - {None}
    masks = sum(bool(batch.patches) or batch.tokens > each for each in windows if each)
    rows = batch.rows if batch.patches else 1  # rows of text have the same one
    return masks * rows * batch.tokens * mask_columns(batch.tokens)


def _values_of_layers(layout: ModelLayout, place: int) -> list[int]:
    """Return the values per token that each layer at this place keeps. A search asks for them
    thousands of times, so equal layers are computed once."""
    values = [layer_values(layout, kind) for kind in layout.sizes.text.kinds]
    return [values[kind] for kind in _kinds_at(layout, place)]


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


def working_bytes(layout: ModelLayout, place: int, batch: BatchSizes) -> int:
    """Return the maximum of temporary bytes: a recomputed layer or block, features before they
    enter the sequence, or logits. Two offloaded layers are on the device in addition: the one that
    computes, and the one that is copied."""
    model, sizes, dims, itemsize = layout.trained.model, layout.sizes, layout.dims, layout.itemsize
    text, tokens = sizes.text, batch.padded_tokens
    temporaries = [0]
    if model.recompute == "full":
        kinds = [text.kinds[kind] for kind in {*_kinds_at(layout, place)}]
        temporaries += [tokens * kept_of_layer(layout, layer) * itemsize for layer in kinds]
    if place == 0 and batch.patches:
        temporaries.append(tokens * text.hidden * sizes.vision.levels * itemsize)
        if model.recompute_vision and not model.freeze_vision:
            patches = batch.patches_of_rank(dims.tp, model.share_images)
            temporaries.append(patches * block_values(layout) * itemsize)
    if dims.is_last(place):
        # Logits, their fp32 copy and the gradient of one of the two exist together.
        logits = batch.supervised * dims.padded_vocab(text.vocab) // dims.tp
        temporaries.append(min(logits, LOGITS_AT_ONCE) * (itemsize + 2 * _FP32))
    largest = sorted(_offloaded_values(layout, place), reverse=True)
    return max(temporaries) + tokens * sum(largest[:2]) * itemsize


def layer_values(layout: ModelLayout, layer: LayerSpec) -> int:
    """Return the number of values per token that a decoder layer keeps for its backward."""
    is_full = layout.cfg.model.recompute == "full"
    return layout.sizes.text.hidden if is_full else kept_of_layer(layout, layer)


def kept_of_layer(layout: ModelLayout, layer: LayerSpec) -> int:
    """Return the number of values per token that a layer keeps if nothing is recomputed."""
    cfg, hidden, tp = layout.trained, layout.sizes.text.hidden, layout.dims.tp
    is_frozen, learning = cfg.model.freeze_language, learns(cfg, "language")
    # The input of a frozen linear layer or norm is not needed again. Next to adapters, norms are
    # frozen.
    norms = 2 if is_frozen else 6 if learning else 4
    norms += layer.post_norms * (2 if learning else 1)
    # The gradients of the experts' weights and adapters need the inputs of their layers.
    inputs = learning or layout.adapted.experts
    # recompute=selective saves nothing: torch's attention keeps no matrix of scores, and the next
    # layer keeps its output anyway.
    return (
        norms * hidden
        + layer.mixer.kept_values(learning) // tp
        + layer.ffn.kept_values(hidden, is_frozen, inputs, tp)
    )


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
