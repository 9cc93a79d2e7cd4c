"""Bytes of activations that a rank of a stage needs: what autograd keeps for the backward, on the
device and on the host, and what is temporary. They are counted per token, patch and supervised
position, and checked against a real forward in tests/planner/test_memory.py."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import ParallelDims, count_offloaded
from megatron_vlm.family.decoder_layers import LayerSpec
from megatron_vlm.family.spec import ModelSizes, Part
from megatron_vlm.lora.targets import adapted_specs, is_of_experts
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.log_probs import LOGITS_AT_ONCE
from megatron_vlm.planner.row_sizes import BatchSizes

_FP32 = 4


def config_as_trained(cfg: Config, sizes: ModelSizes) -> Config:
    """Return the configuration with the freeze_* of the model that decide what is kept for the
    backward. A part with adapters keeps the inputs of its layers, as one that is trained in full
    does."""
    parts = _with_adapters(cfg, sizes).parts
    vision, merger, language = (not (learns(cfg, each) or each in parts) for each in SWITCHES)
    model = replace(cfg.model, freeze_vision=vision, freeze_merger=merger, freeze_language=language)
    return replace(cfg, model=model)


@dataclass(frozen=True)
class _Adapted:
    """Parts of the model that have adapters."""

    parts: frozenset[str] = frozenset()  # among the tower, the projectors and the decoder
    experts: bool = False
    head: bool = False


def _with_adapters(cfg: Config, sizes: ModelSizes) -> _Adapted:
    return _adapted_by(sizes, cfg.lora.targets) if cfg.lora.rank else _Adapted()


@lru_cache(maxsize=8)
def _adapted_by(sizes: ModelSizes, targets: tuple[str, ...]) -> _Adapted:
    weights = adapted_specs(sizes.with_head, targets)
    without_head = [weight for weight in weights if weight.part is not Part.head]
    parts = frozenset(weight.part.switch for weight in without_head)
    return _Adapted(parts, any(map(is_of_experts, weights)), len(without_head) < len(weights))


def activations(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    place: int,
    batch: BatchSizes,
    itemsize: int,
) -> int:
    """Return the bytes that a stage, or its chunk at this place in the pipeline, keeps of a
    micro-batch on the device for its backward."""
    text = sizes.text
    tokens = batch.padded_tokens
    if place == 0 and _is_frozen(cfg):
        return _kept_of_head(cfg, sizes, batch) * itemsize if dims.is_last(place) else 0
    values = tokens * sum(_values_of_layers(cfg, sizes, dims, place))
    # Features that have not been added yet arrive with the hidden states.
    arriving = Carry.extras(sizes, dims, place - 1, bool(batch.patches))
    if place > 0 or cfg.model.recompute == "full":
        values += tokens * text.hidden * arriving
    if place == 0:
        patches = batch.patches_of_rank(dims.tp, cfg.model.share_images)
        values += patches * patch_values(cfg, sizes)
    if dims.is_last(place):
        norm = 1 if cfg.model.freeze_language else 2
        values += norm * tokens * text.hidden + _kept_of_head(cfg, sizes, batch)
    return values * itemsize - offloaded_activations(cfg, sizes, dims, place, batch, itemsize)


def offloaded_activations(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    place: int,
    batch: BatchSizes,
    itemsize: int,
) -> int:
    """Return the bytes that a stage, or its chunk at this place in the pipeline, has of a
    micro-batch in the memory of the host for its backward."""
    values = _offloaded_values(cfg, sizes, dims, place)
    if not values:
        return 0
    per_token = sum(values)
    if place > 0:  # the schedule keeps the input of a stage on the device
        per_token -= sizes.text.hidden
    elif cfg.model.recompute == "full":
        per_token += sizes.text.hidden * Carry.extras(sizes, dims, -1, bool(batch.patches))
    return batch.padded_tokens * per_token * itemsize


def _offloaded_values(cfg: Config, sizes: ModelSizes, dims: ParallelDims, place: int) -> list[int]:
    """Return the values per token of each layer at this place that is offloaded."""
    if not cfg.model.offload_activations or (place == 0 and _is_frozen(cfg)):
        return []
    values = _values_of_layers(cfg, sizes, dims, place)
    return values[: count_offloaded(cfg.model.offload_activations, len(values))]


def _values_of_layers(cfg: Config, sizes: ModelSizes, dims: ParallelDims, place: int) -> list[int]:
    """Return the values per token that each layer at this place keeps. A search asks for them
    thousands of times, so equal layers are computed once."""
    values = [layer_values(cfg, sizes, kind, dims.tp) for kind in sizes.text.kinds]
    return [values[kind] for kind in _kinds_at(sizes, dims, place)]


def _kinds_at(sizes: ModelSizes, dims: ParallelDims, place: int) -> tuple[int, ...]:
    """Return the kind of each layer at this place."""
    layers = dims.layers_at(place)
    return sizes.text.kind_of[layers.start : layers.stop]


def _is_frozen(cfg: Config) -> bool:
    """Return whether only the head has adapters, so that nothing before it has a gradient."""
    return all(getattr(cfg.model, f"freeze_{part}") for part in SWITCHES)


def _kept_of_head(cfg: Config, sizes: ModelSizes, batch: BatchSizes) -> int:
    """Return the number of values: the input of the head, and the output of its adapter's A."""
    low = cfg.lora.rank if _with_adapters(cfg, sizes).head else 0
    return batch.supervised * (sizes.text.hidden + low)


def working_bytes(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    place: int,
    batch: BatchSizes,
    itemsize: int,
) -> int:
    """Return the maximum of temporary bytes: a recomputed layer or block, features before they
    enter the sequence, or logits. Two offloaded layers are on the device in addition: the one that
    computes, and the one that is copied."""
    text, tokens = sizes.text, batch.padded_tokens
    temporaries = [0]
    if cfg.model.recompute == "full":
        kinds = [text.kinds[kind] for kind in {*_kinds_at(sizes, dims, place)}]
        kept = [kept_of_layer(cfg, sizes, layer, dims.tp) for layer in kinds]
        temporaries += [tokens * values * itemsize for values in kept]
    if place == 0 and batch.patches:
        temporaries.append(tokens * text.hidden * sizes.vision.levels * itemsize)
        if cfg.model.recompute_vision and not cfg.model.freeze_vision:
            patches = batch.patches_of_rank(dims.tp, cfg.model.share_images)
            temporaries.append(patches * block_values(sizes) * itemsize)
    if dims.is_last(place):
        # Logits, their fp32 copy and the gradient of one of the two exist together.
        logits = batch.supervised * dims.padded_vocab(text.vocab) // dims.tp
        temporaries.append(min(logits, LOGITS_AT_ONCE) * (itemsize + 2 * _FP32))
    largest = sorted(_offloaded_values(cfg, sizes, dims, place), reverse=True)
    return max(temporaries) + tokens * sum(largest[:2]) * itemsize


def layer_values(cfg: Config, sizes: ModelSizes, layer: LayerSpec, tp: int) -> int:
    """Return the number of values per token that a decoder layer keeps for its backward."""
    is_full = cfg.model.recompute == "full"
    return sizes.text.hidden if is_full else kept_of_layer(cfg, sizes, layer, tp)


def kept_of_layer(cfg: Config, sizes: ModelSizes, layer: LayerSpec, tp: int) -> int:
    """Return the number of values per token that a layer keeps if nothing is recomputed."""
    hidden, is_frozen, learning = sizes.text.hidden, cfg.model.freeze_language, False
    # The input of a frozen linear layer or norm is not needed again. Next to adapters, norms are
    # frozen.
    norms = 2 if is_frozen else 4
    if not is_frozen and (learning := learns(cfg, "language")):
        norms = 6
    # The gradients of the experts' weights and adapters need the inputs of their layers.
    inputs = learns(cfg, "language") or _with_adapters(cfg, sizes).experts
    # recompute=selective saves nothing: torch's attention keeps no matrix of scores, and the next
    # layer keeps its output anyway.
    return (
        norms * hidden
        + layer.mixer.kept_values(learning) // tp
        + layer.ffn.kept_values(hidden, is_frozen, inputs, tp)
    )


def patch_values(cfg: Config, sizes: ModelSizes) -> int:
    """Return the number of values per patch that the vision tower keeps for its backward."""
    vision = sizes.vision
    merger = vision.levels * (3 * vision.hidden + vision.out_hidden // vision.merge**2)
    if cfg.model.freeze_vision:  # nothing before the mergers has a gradient
        return 0 if cfg.model.freeze_merger else merger
    block = vision.hidden if cfg.model.recompute_vision else block_values(sizes)
    return vision.patch_values + vision.depth * block + merger


def block_values(sizes: ModelSizes) -> int:
    """Return the number of values per patch that one block of the tower keeps."""
    return 2 * sizes.vision.ffn + 9 * sizes.vision.hidden
