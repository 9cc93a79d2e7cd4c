"""Switches that save memory on one stage, each with the bytes that it would save there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_vlm.config.schema import Config, get
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.hf.backend import BACKENDS
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.planner.row_sizes import BatchSizes

_SMALLEST_SHARE = 0.01  # a switch that saves a smaller share of the stage's memory is no help

# Keys with the value that saves most.
_SAVING_MOST: Mapping[str, object] = {
    "model.recompute": "full",
    "model.recompute_vision": True,
    "model.offload_activations": 1.0,
    "optim.states": "int8",
    "optim.offload": 1.0,
}

Trial = tuple[str, Config, Sequence[BatchSizes]]


def allows_switch(cfg: Config, key: str) -> bool:
    """Return whether the configuration can have this key at another value than its default."""
    if key == "optim.offload":
        return cfg.optim.name == "adamw"
    return key != "model.offload_activations" or not BACKENDS[cfg.model.backend].fuses_norms


def with_keys(cfg: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with other values of some keys."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        cfg = replace(cfg, **{group: replace(getattr(cfg, group), **{name: value})})
    return cfg


def shown(key: str, value: object) -> str:
    """Return a key with its value as an override."""
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


def switches_by_bytes(
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    stage: int,
    batches: Sequence[BatchSizes],
    itemsize: int,
) -> list[tuple[str, int]]:
    """Return KEY=VALUE and the bytes that it saves on a rank of this stage, those that save most
    first. Switches that train less come after all others. One key changes at a time."""
    need = stage_memory(cfg, sizes, dims, stage, batches, itemsize).total
    ranked: list[tuple[str, int]] = []
    for trials in (_exact(cfg, dims, batches), _trained_less(cfg, batches)):
        saved = [
            (name, need - stage_memory(trial, sizes, dims, stage, smaller, itemsize).total)
            for name, trial, smaller in trials
        ]
        helpful = [each for each in saved if each[1] >= _SMALLEST_SHARE * need]
        ranked += sorted(helpful, key=lambda each: -each[1])
    return ranked


def _exact(cfg: Config, dims: ParallelDims, batches: Sequence[BatchSizes]) -> Iterator[Trial]:
    """Yield the switches that train the same weights on the same rows."""
    for key, value in _SAVING_MOST.items():
        if get(cfg, key) != value and allows_switch(cfg, key):
            yield shown(key, value), with_keys(cfg, {key: value}), batches
    if dims.dp > 1 and not cfg.parallel.distributed_optimizer:
        trial = replace(cfg, parallel=replace(cfg.parallel, distributed_optimizer=True))
        yield "parallel.distributed_optimizer=true", trial, batches
    if max((each.rows for each in batches), default=1) > 1:
        name = f"train.micro_batch_size={-(-cfg.train.micro_batch_size // 2)}"
        if cfg.train.micro_batch_tokens is not None:
            name = f"train.micro_batch_tokens={cfg.train.micro_batch_tokens // 2}"
        yield name, cfg, [half for each in batches for half in _halves(each)]


def _trained_less(cfg: Config, batches: Sequence[BatchSizes]) -> Iterator[Trial]:
    if cfg.lora.rank:  # everything else is frozen already
        return
    if not cfg.model.freeze_vision:
        trial = replace(cfg, model=replace(cfg.model, freeze_vision=True))
        yield "model.freeze_vision=true", trial, batches
    yield "lora=default", replace(cfg, lora=USUAL), batches


def _halves(batch: BatchSizes) -> Iterator[BatchSizes]:
    """Yield two micro-batches with half of the rows each, or the same one if it has one row."""
    if batch.rows == 1:
        yield batch
        return
    for rows in (-(-batch.rows // 2), batch.rows // 2):
        yield replace(
            batch,
            rows=rows,
            supervised=batch.supervised * rows // batch.rows,
            patches=batch.patches * rows // batch.rows,
        )
