"""Operations, bytes moved and bytes sent of a stage for one micro-batch, forward and backward.

A multiplication and an addition count as two operations. Padding counts for the decoder, and
neither for the tower nor for the head and a last MLP that compute only supervised tokens.
"""

import operator
from dataclasses import dataclass, replace

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import learns
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.family.decoder_layers import Attention, Experts, LayerSpec
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import block_values, kept_of_layer, layer_values
from megatron_vlm.planner.parameters import ParamCounts
from megatron_vlm.planner.row_sizes import BatchSizes

# Number of times that a value kept for the backward is written or read. The forward also counts the
# values between, which are not kept; the backward also counts the gradient. The numbers are fitted
# to measured stages on a CPU (benchmarks/plan.py).
_TOUCHED_FORWARD, _TOUCHED_BACKWARD = 5, 3
_FP32 = 4
# Bytes read and written for each weight that is computed from its code (hf/block_weight.py).
_DECODED_BYTES = {"nf4": 15, "int8": 19}


@dataclass(frozen=True)
class OpCount:
    """Operations and bytes of one rank."""

    matmul: float = 0.0  # operations of matrix products
    attention: float = 0.0  # operations of attention between tokens
    moved: float = 0.0  # bytes read and written by everything else
    reduced: float = 0.0  # bytes that each rank sends to its tensor parallel neighbours
    exchanged: float = 0.0  # bytes sent to the experts of all ranks, this one included, or back
    layers: float = 0.0  # number of decoder layers or tower blocks, which each start their kernels
    offloaded: float = 0.0  # bytes copied to the memory of the host, or back

    def __add__(self, other: "OpCount") -> "OpCount":
        return OpCount(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> "OpCount":
        return OpCount(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class StepCost:
    """Cost of a forward and a backward."""

    forward: OpCount = OpCount()
    backward: OpCount = OpCount()

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "StepCost":
        return StepCost(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class MicroWork:
    """Work of one micro-batch, in the parts that a split of the layers combines."""

    layers: tuple[StepCost, ...]  # a decoder layer of each kind, and the last if it ends at places
    first: StepCost  # stage 0 without its layers: embedding, tower, scatter
    last: StepCost  # last stage without its layers: the head
    hidden: int  # bytes of what travels between stages besides DeepStack features
    features: int  # sets of DeepStack features that leave the tower


def micro_work(layout: ModelLayout, batch: BatchSizes) -> MicroWork:
    """Return the parts of a micro-batch's work on a rank."""
    sizes, work = layout.sizes, WorkModel.from_sizes(layout.sizes)
    return MicroWork(
        (
            *(_layer(layout, kind, batch) for kind in sizes.text.kinds),
            *[_layer(layout, sizes.text.layers[-1], batch, True)] * sizes.text.ends_at_places,
        ),
        _first(layout, work, batch),
        _head(layout, batch) + _mtp_head(layout, batch),
        # The decoder's input travels beside the hidden states.
        (1 + sizes.trains_mtp) * batch.padded_tokens * sizes.text.hidden * layout.itemsize,
        sizes.vision.deepstack if batch.patches else 0,
    )


def _products(cfg: Config, part: str) -> int:
    """Return the matrix products of a backward for each one of a forward: one for the gradient of
    the input, and one for the gradient of a weight that learns."""
    return 1 + learns(cfg, part)


def _layer(
    layout: ModelLayout, layer: LayerSpec, batch: BatchSizes, at_places: bool = False
) -> StepCost:
    """Return the cost of a decoder layer of this kind. `at_places`: its MLP gets supervised tokens
    alone."""
    cfg, tp, itemsize = layout.trained, layout.dims.tp, layout.itemsize
    text, tokens = layout.sizes.text, batch.padded_tokens
    of_pairs = 0
    if isinstance(layer.mixer, Attention):
        picture_pairs = layout.sizes.vision.token_pairs(batch.patches, batch.patch_pairs)
        of_pairs = layer.mixer.pair_flops([batch.tokens] * batch.rows, picture_pairs)
    kept_bytes = kept_of_layer(layout, layer, batch, at_places) * itemsize
    left_out = tokens - batch.supervised if at_places else 0
    # The outputs of attention and of the MLP are summed over the ranks.
    reduced = ring(tp) * (2 * tokens - left_out) * text.hidden * itemsize
    exchanged = 0.0
    if isinstance(layer.ffn, Experts):  # each token is sent to its experts, and back
        exchanged = 2 * layer.ffn.top_k * tokens * text.hidden * itemsize
    # A share of the layers is counted as that share of each.
    offloaded = cfg.model.offload_activations * itemsize
    offloaded *= layer_values(layout, layer, batch, at_places)
    matmul = layer.flops_per_token(text.hidden) * tokens
    matmul -= layer.mlp_flops_per_token(text.hidden) * left_out
    of_mixer = layer.mixer.flops_per_token * tokens / tp
    forward = OpCount(
        matmul / tp, of_pairs / tp, _TOUCHED_FORWARD * kept_bytes, reduced, exchanged, 1, offloaded
    )
    recomputed = {
        "none": OpCount(),
        "selective": OpCount(attention=forward.attention),
        "full": replace(forward, offloaded=0.0),
    }
    backward = OpCount(
        # A delta net's rule is computed again, and has the gradients of both factors to compute.
        _products(cfg, "language") * (forward.matmul - of_mixer) + 3 * of_mixer,
        2 * forward.attention,
        _TOUCHED_BACKWARD * kept_bytes,
        reduced,
        exchanged,
        1,
        offloaded,
    )
    return StepCost(forward, backward + recomputed[cfg.model.recompute])


def _first(layout: ModelLayout, work: WorkModel, batch: BatchSizes) -> StepCost:
    """Return the cost of the embedding, the tower and the scatter of features into the sequence."""
    cfg, sizes, itemsize = layout.trained, layout.sizes, layout.itemsize
    vision, embedded = sizes.vision, batch.padded_tokens * sizes.text.hidden * itemsize
    embedding = StepCost(OpCount(moved=2 * embedded), OpCount(moved=2 * embedded))
    if not batch.patches:
        return embedding
    patches = batch.patches_of_rank(layout.dims.tp, cfg.model.share_images)
    share = patches / batch.patches
    kept_bytes = patches * vision.depth * block_values(layout) * itemsize
    tower = OpCount(
        work.per_patch_of_tower * patches,
        work.per_patch_pair * batch.patch_pairs * share,
        _TOUCHED_FORWARD * kept_bytes,
        layers=vision.depth,
    )
    mergers = OpCount(work.per_patch_of_mergers * patches)
    scattered = OpCount(moved=2 * vision.levels * embedded)
    backward = scattered
    if not cfg.model.freeze_vision:
        backward += OpCount(
            _products(cfg, "vision") * tower.matmul,
            2 * tower.attention,
            _TOUCHED_BACKWARD * kept_bytes,
        )
        backward += OpCount(layers=vision.depth)
        backward += tower if cfg.model.recompute_vision else OpCount()
    if not (cfg.model.freeze_vision and cfg.model.freeze_merger):
        backward += mergers * _products(cfg, "merger")
    return embedding + StepCost(tower + mergers + scattered, backward)


def _head(layout: ModelLayout, batch: BatchSizes) -> StepCost:
    """Return the cost of the final norm and of the logits of supervised tokens."""
    text, tp, itemsize = layout.sizes.text, layout.dims.tp, layout.itemsize
    at_places = batch.supervised if text.ends_at_places else batch.padded_tokens
    normed = at_places * text.hidden * itemsize
    logits = batch.supervised * text.vocab / tp
    forward = OpCount(
        2 * text.hidden * logits,
        # Logits are written, converted to fp32, and read for the maximum and the sum.
        moved=2 * normed + logits * (2 * itemsize + 3 * _FP32),
    )
    backward = OpCount(
        _products(layout.trained, "language") * forward.matmul,
        moved=3 * normed + logits * (2 * itemsize + 2 * _FP32),
        reduced=ring(tp) * batch.supervised * text.hidden * itemsize,
    )
    return StepCost(forward, backward)


def _mtp_head(layout: ModelLayout, batch: BatchSizes) -> StepCost:
    """Return the cost of an MTP head that learns: its layer, the product before it, and the
    logits. The model's most likely tokens and their log-probs take two passes over the vocabulary,
    and so do the guesses."""
    text, mtp, tokens = layout.sizes.text, layout.sizes.mtp, batch.padded_tokens
    if mtp is None or not layout.sizes.trains_mtp:
        return StepCost()
    joined = OpCount(4 * text.hidden * text.hidden * tokens)
    logits = batch.supervised * text.vocab / layout.dims.tp
    once = OpCount(2 * text.hidden * logits, moved=logits * (2 * layout.itemsize + 3 * _FP32))
    last = text.layers[-1].mlp_flops_per_token(text.hidden) * tokens * text.ends_at_places
    read = OpCount(last / layout.dims.tp)  # the last layer's output at all places
    own = StepCost(joined + once * 4 + read, joined * 2 + once)
    return own + _layer(layout.of_mtp_head, mtp.layer, batch)


def accumulate(values: int, itemsize: int) -> OpCount:
    """Return the cost of adding a backward's gradients to the step's, in fp32."""
    return OpCount(moved=values * (2 * itemsize + 2 * _FP32))


def decode(cfg: Config, values: int) -> StepCost:
    """Return the cost of computing weights from the codes of lora.base: once in the forward, once
    in the backward, and once more if the layers are recomputed."""
    if cfg.lora.base is None:
        return StepCost()
    once = OpCount(moved=values * _DECODED_BYTES[cfg.lora.base])
    return StepCost(once, once * (1 + (cfg.model.recompute == "full")))


def update(counts: ParamCounts, bytes_of_state: float) -> OpCount:
    """Return the cost of an optimizer step with states of this size. Gradients are zeroed and
    divided, and their norm is computed. The optimizer reads gradient, weight and states, and writes
    the last two. Muon orthogonalises matrices."""
    moved = 4 * _FP32 * counts.gradients + 3 * _FP32 * counts.optimized
    return OpCount(counts.muon_flops, moved=moved + 2 * bytes_of_state * counts.states)


def ring(ranks: int) -> float:
    """Return the bytes that each rank sends for a sum over a ring, as a multiple of its size."""
    return 2 * (ranks - 1) / ranks
