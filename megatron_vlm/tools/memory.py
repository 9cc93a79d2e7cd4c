"""About how much memory a rank of each stage needs: an estimate, before anything is loaded.

Weights, gradients and optimizer state follow from the names and shapes of the checkpoint.
Activations are what autograd keeps, counted per token, patch and supervised position; the counts
are checked against a real forward in tests/test_dry_run.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.hf.names import REPLICATED, Entry
from megatron_vlm.hf.source import Source
from megatron_vlm.model.build import is_frozen

_FP32 = 4


@dataclass(frozen=True)
class BatchSizes:
    """Of a micro-batch."""

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
    """Bytes of one rank of a stage."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(
    cfg: Config,
    source: Source,
    dims: ParallelDims,
    table: Sequence[Entry],
    batches: Sequence[BatchSizes],
    itemsize: int,
) -> list[StageMemory]:
    """One a stage. `batches`: the micro-batches of a step on one replica; `itemsize`: bytes of a
    weight."""
    found = []
    for stage in range(dims.pp):
        counts = {True: 0, False: 0}
        for entry in table:
            if entry.stage == stage:
                values = sum(source.num_values(name) for name in entry.theirs)
                cut = 1 if entry.layout is REPLICATED else dims.tp
                counts[is_frozen(entry.ours, cfg.model)] += values // cut
        trained = counts[False]
        # Adam's moments, and fp32 main weights where the model's are not fp32.
        state = _FP32 * (2 if itemsize == _FP32 else 3) * trained
        if cfg.parallel.distributed_optimizer:
            state //= dims.dp
        found.append(
            StageMemory(
                itemsize * sum(counts.values()),
                _FP32 * trained,
                state,
                _activations(cfg, source.config, dims, stage, batches, itemsize),
            )
        )
    return found


def _activations(
    cfg: Config,
    hf_config: PretrainedConfig,
    dims: ParallelDims,
    stage: int,
    batches: Sequence[BatchSizes],
    itemsize: int,
) -> int:
    """Of the micro-batches that a stage has under way together: the first stage most of them."""
    each = sorted(
        (_of_micro_batch(cfg, hf_config, dims, stage, batch, itemsize) for batch in batches),
        reverse=True,
    )
    return sum(each[: dims.pp - stage])


def _of_micro_batch(
    cfg: Config,
    hf_config: PretrainedConfig,
    dims: ParallelDims,
    stage: int,
    batch: BatchSizes,
    itemsize: int,
) -> int:
    text, vision = hf_config.text_config, hf_config.vision_config
    layers, hidden = dims.layers_per_stage[stage], text.hidden_size
    values = batch.padded_tokens * layers * layer_values(cfg, hf_config, dims.tp)
    if stage == 0:
        values += batch.padded_tokens * hidden
        patches = batch.patches
        if cfg.model.share_images:
            patches = max(-(-patches // dims.tp), batch.largest_image)
        values += patches * patch_values(cfg, hf_config)
        levels = 1 + len(vision.deepstack_visual_indexes)
        if batch.patches:  # features scattered into the sequence, one for each DeepStack layer too
            values += batch.padded_tokens * hidden * levels
    head = 0
    if stage == dims.pp - 1:
        values += batch.supervised * hidden + 2 * batch.padded_tokens * hidden
        # Logits, their fp32 copy and the gradient of one of them.
        head = batch.supervised * -(-text.vocab_size // dims.tp) * (itemsize + 2 * _FP32)
    return values * itemsize + head


def layer_values(cfg: Config, hf_config: PretrainedConfig, tp: int) -> int:
    """What one decoder layer keeps for its backward, for each token."""
    text = hf_config.text_config
    query, key = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    if cfg.model.recompute == "full":
        return int(text.hidden_size)
    cut = 5 * text.intermediate_size + 5 * query + 4 * key
    if cfg.model.recompute == "selective":
        cut -= query  # core attention's own output and its statistics
    return int(6 * text.hidden_size + cut // tp)


def patch_values(cfg: Config, hf_config: PretrainedConfig) -> int:
    """What the vision tower keeps for its backward, for each patch; nothing where it is frozen."""
    vision = hf_config.vision_config
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    if cfg.model.freeze_vision and cfg.model.freeze_merger:
        return int(pixels)
    width = vision.hidden_size
    block = 2 * vision.intermediate_size + 12 * width
    if cfg.model.recompute_vision or cfg.model.freeze_vision:
        block = width
    mergers = 1 + len(vision.deepstack_visual_indexes)
    merger = 3 * width + vision.out_hidden_size // vision.spatial_merge_size**2
    return int(pixels + vision.depth * block + mergers * merger)
