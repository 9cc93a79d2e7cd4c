"""What the keys of `lora` mean together with the others: which weights learn, what is exported."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Literal

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.errors import ConfigError

SWITCHES = ("vision", "merger", "language")  # the parts of model.freeze_*
Exported = Literal["model", "adapter", "merged"]
USUAL = LoraConfig(rank=16, alpha=32)  # lora=default


def learns(cfg: Config, switch: str) -> bool:
    """Whether the weights of a part are trained themselves: with adapters only those parts that
    lora.train names."""
    if cfg.lora.rank:
        return switch in cfg.lora.train
    return not getattr(cfg.model, f"freeze_{switch}")


def scale_of(lora: LoraConfig) -> float:
    """The factor of what adapters add."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def exports(cfg: Config) -> tuple[Exported, ...]:
    """What checkpoint.export asks for, the folder `export` of a run first."""
    asked = cfg.checkpoint.export
    if asked is False:
        return ()
    if not cfg.lora.rank:
        return ("model",)
    return {"merged": ("merged",), "both": ("adapter", "merged")}.get(str(asked), ("adapter",))  # type: ignore[return-value]


def export_of(cfg: Config) -> Exported:
    """What to write of adapters where nobody says: as checkpoint.export does, or these alone."""
    return next(iter(exports(cfg)), "adapter")


def check_lora(cfg: Config) -> None:
    """Refuse values of lora.* and checkpoint.export that cannot work, alone or together."""
    for error in _errors(cfg) if cfg.lora.rank else _leftovers(cfg):
        raise error


def _leftovers(cfg: Config) -> Iterator[ConfigError]:
    """Refuse what is set for adapters where there are none."""
    usual = LoraConfig()
    for name in [each.name for each in fields(usual)]:
        if (value := getattr(cfg.lora, name)) != getattr(usual, name):
            yield ConfigError(
                "has no effect: lora.rank=0 means that there are no adapters",
                key=f"lora.{name}",
                found=value,
                remedy="set lora.rank=16, or choose a recipe such as lora=default",
            )
    export = cfg.checkpoint.export
    if not isinstance(export, bool):
        yield ConfigError(
            ": there are no adapters", key="checkpoint.export", found=export, allowed=(True, False)
        )


def _errors(cfg: Config) -> Iterator[ConfigError]:
    lora, export = cfg.lora, cfg.checkpoint.export
    if not isinstance(export, bool) and export not in ("adapter", "merged", "both"):
        yield ConfigError(
            key="checkpoint.export",
            found=export,
            allowed=("adapter", "merged", "both", True, False),
        )
    for name, given in (("targets", lora.targets), ("train", lora.train)):
        if not all(isinstance(each, str) and each for each in given):
            yield ConfigError(key=f"lora.{name}", found=given, allowed="a list of names")
    if not lora.targets:
        yield ConfigError(
            "is empty",
            key="lora.targets",
            remedy="give parts such as [attention,mlp], or set lora.rank=0",
        )
    for part in lora.train:
        if part not in SWITCHES:
            yield ConfigError(
                f": {part} is not a part", key="lora.train", found=lora.train, allowed=SWITCHES
            )
        elif getattr(cfg.model, f"freeze_{part}"):
            yield ConfigError(
                f"trains what model.freeze_{part}=true keeps as it is",
                key="lora.train",
                found=lora.train,
                remedy="change one of them",
            )
    if "adapter" in exports(cfg) and (whole := [p for p in lora.train if p != "merger"]):
        yield ConfigError(
            f": PEFT's files have no place for the weights of {whole[0]} as a whole",
            key="lora.train",
            found=lora.train,
            remedy="set checkpoint.export=merged, or false",
        )
