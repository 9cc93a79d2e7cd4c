"""Estimates how much memory a rank of each stage needs, before anything is loaded.

Weights, gradients and optimizer state follow from the names and shapes of the checkpoint.
Activations are what autograd keeps, counted per token, patch and supervised position; the counts
are checked against a real forward in tests/test_dry_run.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.sizes import ModelSizes
from megatron_vlm.hf.names import Entry

_FP32 = 4


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a micro-batch."""

    rows: int
    tokens: int  # of its longest row
    supervised: int
    patches: int
    largest_image: int  # in patches

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one rank of a stage needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    table: Sequence[Entry],
    batches: Sequence[BatchSizes],
    itemsize: int,
) -> list[StageMemory]:
    """One estimate per stage. `batches`: the micro-batches of a step on one replica; `itemsize`:
    bytes of a weight."""
    found = []
    for stage in range(dims.pp):
        held = trained = 0
        for entry in table:
            if entry.stage == stage:
                values = entry.num_values // (1 if entry.layout.cut is None else dims.tp)
                held += values
                trained += 0 if entry.is_frozen(cfg.model) else values
        # Adam's moments, and fp32 main weights where the model's are not fp32.
        state = _FP32 * (2 if itemsize == _FP32 else 3) * trained
        if cfg.parallel.distributed_optimizer:
            state //= dims.dp
        kept = []
        for chunk in range(dims.virtual_stages):
            place = dims.place_of(stage, chunk)
            of_chunk = [_activations(cfg, sizes, dims, place, each, itemsize) for each in batches]
            kept.append(sorted(of_chunk, reverse=True))
        activations = max(
            sum(sum(each[:count]) for each, count in zip(kept, counts, strict=True))
            for counts in in_flight(dims, stage, len(batches))
        )
        found.append(StageMemory(itemsize * held, _FP32 * trained, state, activations))
    return found


def in_flight(dims: ParallelDims, stage: int, batches: int) -> set[tuple[int, ...]]:
    """How many micro-batches the chunks of a stage keep at once, whenever Megatron's schedule turns
    from a forward to a backward."""
    pp, chunks = dims.pp, dims.virtual_stages
    # Groups of pp micro-batches, each through all chunks; fillers complete the last group.
    order = [chunk for _ in range(-(-batches // pp)) for chunk in range(chunks) for _ in range(pp)]
    back = [chunks - 1 - chunk for chunk in order]
    ahead = pp - stage - 1  # forwards before the first backward
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * pp
    found = set()
    for done in range(max(min(len(order) - ahead, 2 * pp * chunks), 1)):
        begun, ended = order[: ahead + done + 1], back[:done]
        found.add(tuple(begun.count(chunk) - ended.count(chunk) for chunk in range(chunks)))
    return found


def _activations(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, place: int, batch: BatchSizes, itemsize: int
) -> int:
    """Bytes that a stage, or its chunk at this place in the pipeline, keeps of a micro-batch for
    its backward."""
    text, vision = sizes.text, sizes.vision
    layers, hidden = dims.layers_per_stage[place], text.hidden
    values = batch.padded_tokens * layers * layer_values(cfg, sizes, dims.tp)
    if place == 0:
        values += batch.padded_tokens * hidden
        patches = batch.patches
        if cfg.model.share_images:
            patches = max(-(-patches // dims.tp), batch.largest_image)
        values += patches * patch_values(cfg, sizes)
        if batch.patches:  # features scattered into the sequence, one set per DeepStack layer too
            values += batch.padded_tokens * hidden * vision.levels
    head = 0
    if place == len(dims.layers_per_stage) - 1:
        values += batch.supervised * hidden + 2 * batch.padded_tokens * hidden
        # Logits, their fp32 copy and the gradient of one of them.
        head = batch.supervised * -(-text.vocab // dims.tp) * (itemsize + 2 * _FP32)
    return values * itemsize + head


def layer_values(cfg: Config, sizes: ModelSizes, tp: int) -> int:
    """Numbers that one decoder layer keeps per token for its backward."""
    text = sizes.text
    if cfg.model.recompute == "full":
        return text.hidden
    cut = 5 * text.ffn + 5 * text.query + 4 * text.kv
    if cfg.model.recompute == "selective":
        cut -= text.query  # core attention's own output and its statistics
    return 6 * text.hidden + cut // tp


def patch_values(cfg: Config, sizes: ModelSizes) -> int:
    """Numbers that the vision tower keeps per patch for its backward; pixels alone if frozen."""
    vision = sizes.vision
    pixels = vision.patch_values
    if cfg.model.freeze_vision and cfg.model.freeze_merger:
        return pixels
    block = 2 * vision.ffn + 12 * vision.hidden
    if cfg.model.recompute_vision or cfg.model.freeze_vision:
        block = vision.hidden
    merger = 3 * vision.hidden + vision.out_hidden // vision.merge**2
    return pixels + vision.depth * block + vision.levels * merger
