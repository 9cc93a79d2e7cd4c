"""What a stage computes, moves and sends for one micro-batch, forward and backward.

A multiplication and an addition count as two operations. Padding is computed by the decoder, and
neither by the tower nor by the head, which takes supervised tokens alone.
"""

from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import learns
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.memory import as_trained, block_values, kept_of_layer
from megatron_vlm.planner.parameters import ParamCounts
from megatron_vlm.planner.row_sizes import BatchSizes

# How often a value that is kept for the backward is written or read: in the forward together with
# the values between, which are not kept; in the backward with its gradient. Fitted to measured
# stages on a CPU (benchmarks/plan.py).
_TOUCHED_FORWARD, _TOUCHED_BACKWARD = 5, 3
_FP32 = 4


@dataclass(frozen=True)
class OpCount:
    """Of one rank."""

    matmul: float = 0.0  # operations of matrix products
    attention: float = 0.0  # operations of attention between tokens
    moved: float = 0.0  # bytes read and written by everything else
    reduced: float = 0.0  # bytes that each rank sends to its tensor parallel neighbours
    exchanged: float = 0.0  # bytes that go to the experts of all ranks, this one's too, or back
    layers: float = 0.0  # of the decoder or blocks of the tower: how many start their kernels

    def __add__(self, other: "OpCount") -> "OpCount":
        return OpCount(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def __mul__(self, factor: float) -> "OpCount":
        return OpCount(*(factor * value for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        sent = (self.reduced, self.exchanged)
        return (self.matmul, self.attention, self.moved, *sent, self.layers)


@dataclass(frozen=True)
class StepCost:
    """Forward and backward."""

    forward: OpCount = OpCount()
    backward: OpCount = OpCount()

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "StepCost":
        return StepCost(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class MicroWork:
    """One micro-batch, in the parts that a split of the layers puts together."""

    layer: StepCost
    first: StepCost  # what stage 0 has besides its layers: embedding, tower, scatter
    last: StepCost  # what the last stage has besides: the head
    hidden: int  # bytes of the hidden states, and of each set of DeepStack features
    features: int  # sets that leave the tower


def micro_work(
    cfg: Config, sizes: ModelSizes, tp: int, batch: BatchSizes, itemsize: int
) -> MicroWork:
    """The parts of a micro-batch's work on one of `tp` ranks."""
    work, text = WorkModel.of(sizes), sizes.text
    hidden = batch.padded_tokens * text.hidden * itemsize
    trained = as_trained(cfg, sizes)
    return MicroWork(
        _layer(trained, sizes, work, tp, batch, itemsize),
        _first(trained, sizes, work, tp, batch, itemsize),
        _head(trained, sizes, work, tp, batch, itemsize),
        hidden,
        sizes.vision.deepstack if batch.patches else 0,
    )


def _products(cfg: Config, part: str) -> int:
    """Of a backward, for each of a forward: one for the gradient of what comes in, and one for that
    of a weight that learns."""
    return 1 + learns(cfg, part)


def _layer(
    cfg: Config, sizes: ModelSizes, work: WorkModel, tp: int, batch: BatchSizes, itemsize: int
) -> StepCost:
    """One decoder layer: the mean one, where only some have experts."""
    text, tokens = sizes.text, batch.padded_tokens
    pairs = batch.rows * batch.tokens * (batch.tokens + 1) // 2
    kept = tokens * kept_of_layer(cfg, sizes, tp) * itemsize
    # The output of attention and of the MLP, summed over the ranks.
    reduced = 2 * ring(tp) * tokens * text.hidden * itemsize
    exchanged = 0.0
    if text.experts is not None:  # each token goes to its experts, and comes back
        copies = text.experts.top_k * len(text.experts.layers) / text.layers
        exchanged = 2 * copies * tokens * text.hidden * itemsize
    forward = OpCount(
        work.per_token * tokens / text.layers / tp,
        work.per_token_pair * pairs / text.layers / tp,
        _TOUCHED_FORWARD * kept,
        reduced,
        exchanged,
        1,
    )
    again = {"none": OpCount(), "selective": OpCount(attention=forward.attention), "full": forward}
    backward = OpCount(
        _products(cfg, "language") * forward.matmul,
        2 * forward.attention,
        _TOUCHED_BACKWARD * kept,
        reduced,
        exchanged,
        1,
    )
    return StepCost(forward, backward + again[cfg.model.recompute])


def _first(
    cfg: Config, sizes: ModelSizes, work: WorkModel, tp: int, batch: BatchSizes, itemsize: int
) -> StepCost:
    """Embedding, tower, and features on their way into the sequence."""
    vision, tokens = sizes.vision, batch.padded_tokens
    embedded = tokens * sizes.text.hidden * itemsize
    found = StepCost(OpCount(moved=2 * embedded), OpCount(moved=2 * embedded))
    if not batch.patches:
        return found
    patches = batch.patches_of_rank(tp, cfg.model.share_images)
    share = patches / batch.patches
    kept = patches * vision.depth * block_values(sizes) * itemsize
    tower = OpCount(
        work.per_patch_of_tower * patches,
        work.per_patch_pair * batch.patch_pairs * share,
        _TOUCHED_FORWARD * kept,
        layers=vision.depth,
    )
    mergers = OpCount(work.per_patch_of_mergers * patches)
    scattered = OpCount(moved=2 * vision.levels * embedded)
    backward = scattered
    if not cfg.model.freeze_vision:
        backward += OpCount(
            _products(cfg, "vision") * tower.matmul, 2 * tower.attention, _TOUCHED_BACKWARD * kept
        )
        backward += OpCount(layers=vision.depth)
        backward += tower if cfg.model.recompute_vision else OpCount()
    if not (cfg.model.freeze_vision and cfg.model.freeze_merger):
        backward += mergers * _products(cfg, "merger")
    return found + StepCost(tower + mergers + scattered, backward)


def _head(
    cfg: Config, sizes: ModelSizes, work: WorkModel, tp: int, batch: BatchSizes, itemsize: int
) -> StepCost:
    """The final norm, and the logits of supervised tokens."""
    text = sizes.text
    normed = batch.padded_tokens * text.hidden * itemsize
    logits = batch.supervised * text.vocab / tp
    forward = OpCount(
        work.per_supervised * batch.supervised / tp,
        # Logits written, made fp32, and read for the maximum and the sum.
        moved=2 * normed + logits * (2 * itemsize + 3 * _FP32),
    )
    backward = OpCount(
        _products(cfg, "language") * forward.matmul,
        moved=3 * normed + logits * (2 * itemsize + 2 * _FP32),
        reduced=ring(tp) * batch.supervised * text.hidden * itemsize,
    )
    return StepCost(forward, backward)


def accumulate(values: int, itemsize: int) -> OpCount:
    """The gradients of a backward are added to those of the step, in fp32."""
    return OpCount(moved=values * (2 * itemsize + 2 * _FP32))


def update(counts: ParamCounts) -> OpCount:
    """Once a step: gradients are zeroed, divided and their norm taken; AdamW reads gradient,
    weight and moments, and writes the last three."""
    return OpCount(moved=_FP32 * (4 * counts.gradients + 7 * counts.optimized))


def ring(ranks: int) -> float:
    """Times its size that a sum over a ring of ranks makes each of them send."""
    return 2 * (ranks - 1) / ranks
