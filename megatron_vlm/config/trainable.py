"""Keys of `lora` together with the others: which weights learn, and what is exported."""

import math
from collections.abc import Iterator
from typing import Literal, get_args

from megatron_vlm.config.lora_base_types import BaseType
from megatron_vlm.config.schema import Config, LoraConfig, check_of
from megatron_vlm.errors import ConfigError

SWITCHES = ("vision", "merger", "language")  # the parts of model.freeze_*
Exported = Literal["model", "adapter", "merged"]
USUAL = LoraConfig(rank=16, alpha=32)  # lora=default


def learns(cfg: Config, switch: str) -> bool:
    """Return whether the weights of a part are trained themselves. With adapters, only the parts in
    lora.train are."""
    if cfg.lora.rank:
        return switch in cfg.lora.train
    return not getattr(cfg.model, f"freeze_{switch}")


def extra_head(cfg: Config) -> Literal["score", "mtp"] | None:
    """Return the head that learns beside the usual weights: a scalar head or an MTP head."""
    if cfg.train.objective == "reward":
        return "score"
    return "mtp" if cfg.model.mtp == "train" else None


def scale_of(lora: LoraConfig) -> float:
    """Return the factor that scales the output of adapters."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def exports(cfg: Config) -> tuple[Exported, ...]:
    """Return what checkpoint.export requests, the folder `export` of a run first."""
    export = cfg.checkpoint.export
    if export is False:
        return ()
    if not cfg.lora.rank:
        return ("model",)
    return {"merged": ("merged",), "both": ("adapter", "merged")}.get(str(export), ("adapter",))  # type: ignore[return-value]


def export_of(cfg: Config) -> Exported:
    """Return the form in which adapters are written by default."""
    return next(iter(exports(cfg)), "adapter")


@check_of
def check_lora(cfg: Config) -> Iterator[ConfigError]:
    """Refuse values of lora.* and checkpoint.export that cannot work, alone or together."""
    yield from _errors(cfg) if cfg.lora.rank else _leftovers(cfg)


@check_of
def check_mtp(cfg: Config) -> Iterator[ConfigError]:
    """Refuse to train an MTP head where that has no meaning, or nowhere to be stored."""
    if cfg.model.mtp != "train":
        return
    if cfg.train.objective != "sft":
        yield ConfigError(
            f": train.objective={cfg.train.objective} does not train the MTP head",
            key="model.mtp",
            allowed="carry",
        )
    if cfg.lora.rank and "adapter" in exports(cfg):
        yield ConfigError(
            ": PEFT's files have no place for the MTP head",
            key="model.mtp",
            remedy="set checkpoint.export=merged, or false",
        )


def _leftovers(cfg: Config) -> Iterator[ConfigError]:
    """Yield an error for each setting of adapters, where there are none."""
    default = LoraConfig()
    for name, unused in vars(default).items():
        if getattr(cfg.lora, name) != unused:
            yield ConfigError(
                "has no effect: lora.rank=0 means that there are no adapters",
                key=f"lora.{name}",
                remedy="set lora.rank=16, or choose a recipe such as lora=default",
            )
    export = cfg.checkpoint.export
    if not isinstance(export, bool):
        yield ConfigError(": there are no adapters", key="checkpoint.export", allowed=(True, False))


def _errors(cfg: Config) -> Iterator[ConfigError]:
    lora, export = cfg.lora, cfg.checkpoint.export
    if not isinstance(export, bool) and export not in ("adapter", "merged", "both"):
        yield ConfigError(
            key="checkpoint.export", allowed=("adapter", "merged", "both", True, False)
        )
    if lora.base not in (None, *get_args(BaseType)):
        allowed = (*get_args(BaseType), None)
        yield ConfigError(key="lora.base", allowed=allowed)
    for name, names in (("targets", lora.targets), ("train", lora.train)):
        if not all(isinstance(each, str) and each for each in names):
            yield ConfigError(key=f"lora.{name}", allowed="a list of names")
    if not lora.targets:
        raise ConfigError(
            "is empty",
            key="lora.targets",
            remedy="give parts such as [attention,mlp], or set lora.rank=0",
        )
    for part in lora.train:
        if part not in SWITCHES:
            yield ConfigError(f": {part} is not a part", key="lora.train", allowed=SWITCHES)
        elif getattr(cfg.model, f"freeze_{part}"):
            yield ConfigError(
                f"trains what model.freeze_{part}=true keeps as it is",
                key="lora.train",
                remedy="change one of them",
            )
    if "adapter" in exports(cfg) and (whole := [p for p in lora.train if p != "merger"]):
        yield ConfigError(
            f": PEFT's files have no place for the weights of {whole[0]} as a whole",
            key="lora.train",
            remedy="set checkpoint.export=merged, or false",
        )
