"""The switches that save memory: what each costs, and the bytes that it saves on a stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_vlm.config.schema import Config, LoraConfig, get
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.planner.row_sizes import BatchSizes

_SMALLEST_SHARE = 0.01  # a switch that saves a smaller share of the stage's memory is no help
_QLORA = replace(USUAL, base="nf4")  # lora=qlora
_RECIPES = {USUAL: "default", _QLORA: "qlora"}


@dataclass(frozen=True)
class MemorySwitch:
    """A key whose values save memory: the first one nothing, each other one more than the last."""

    key: str
    values: tuple[Any, ...]
    # Rounded moments and weights change the training, and so does to train less. What costs
    # recomputation is chosen with the layout.
    cost: Literal["recomputation", "messages", "host", "moments", "weights", "training"]
    words: str = "{}"  # for a reader, around KEY=VALUE
    needs: Mapping[str, object] = field(default_factory=dict)  # values of other keys

    def further(self, cfg: Config) -> tuple[Any, ...]:
        """Return the values that the configuration can have, and that save more than its own."""
        now = get(cfg, self.key)
        if not self._is_possible(cfg):
            return ()
        if isinstance(now, float):
            return tuple(value for value in self.values if value > now)
        return self.values[1 + (self.values.index(now) if now in self.values else 0) :]

    def _is_possible(self, cfg: Config) -> bool:
        if self.cost in ("training", "weights"):  # adapters freeze everything else already
            return bool(cfg.lora.rank) == (self.cost == "weights")
        if self.key == "model.offload_activations":
            return not BACKENDS[cfg.model.backend].fuses_norms
        return self.key != "optim.offload" or cfg.optim.name == "adamw"

    def at(self, value: object) -> dict[str, object]:
        """Return the keys of a configuration that has the switch at this value."""
        return {**self.needs, self.key: value}


MEMORY_SWITCHES = (
    MemorySwitch("model.recompute", ("none", "full"), "recomputation"),
    MemorySwitch("model.recompute_vision", (False, True), "recomputation"),
    MemorySwitch("parallel.distributed_optimizer", (False, True), "messages"),
    MemorySwitch("optim.states", ("fp32", "bf16", "int8"), "moments"),
    MemorySwitch("optim.offload", (0.0, 1.0), "host"),
    MemorySwitch("model.offload_activations", (0.0, 1.0), "host"),
    MemorySwitch("lora", (LoraConfig(), USUAL), "training", "adapters alone trained, with {}"),
    MemorySwitch(
        "lora",
        (LoraConfig(), _QLORA),
        "training",
        "adapters alone trained over a base in 4 bits, with {}",
    ),
    MemorySwitch("lora.base", (None, "nf4"), "weights", "a base in 4 bits, with {}"),
    MemorySwitch("model.freeze_vision", (False, True), "training"),
    MemorySwitch(
        "model.freeze_language",
        (False, True),
        "training",
        "only the mergers trained, with {}",
        needs={"model.freeze_vision": True},
    ),
)


def with_keys(cfg: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with other values of some keys or groups."""
    value: Any
    for key, value in values.items():
        group, _, name = key.partition(".")
        if name:
            value = replace(getattr(cfg, group), **{name: value})
        cfg = replace(cfg, **{group: value})
    return cfg


def shown(values: Mapping[str, object]) -> str:
    """Return keys with their values as overrides."""
    return " ".join(f"{key}={_override(value)}" for key, value in values.items())


def _override(value: object) -> str:
    if isinstance(value, LoraConfig):
        return _RECIPES[value]
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def switches_by_bytes(
    layout: ModelLayout, stage: int, batches: Sequence[BatchSizes]
) -> list[tuple[str, int]]:
    """Return KEY=VALUE and the bytes that it alone saves on a rank of this stage, the most first.
    Switches that round weights or train less come after all others."""
    cfg, need = layout.cfg, stage_memory(layout, stage, batches).total
    trials = [
        (switch.cost in ("weights", "training"), switch.at(value), batches)
        for switch in MEMORY_SWITCHES
        for value in switch.further(cfg)[-1:]
    ]
    if max((each.rows for each in batches), default=1) > 1:
        limit: dict[str, object] = {"train.micro_batch_size": -(-cfg.train.micro_batch_size // 2)}
        if cfg.train.micro_batch_tokens is not None:
            limit = {"train.micro_batch_tokens": cfg.train.micro_batch_tokens // 2}
        trials.append((False, limit, [half for each in batches for half in _halves(each)]))
    ranked = []
    for is_last, keys, smaller in trials:
        trial = replace(layout, cfg=with_keys(cfg, keys))
        saved = need - stage_memory(trial, stage, smaller).total
        if saved >= _SMALLEST_SHARE * need:
            ranked.append((is_last, -saved, shown(keys)))
    return [(name, -saved) for _, saved, name in sorted(ranked)]


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
