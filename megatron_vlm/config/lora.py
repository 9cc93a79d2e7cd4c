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
    for problem in _problems(cfg) if cfg.lora.rank else _leftovers(cfg):
        raise ConfigError(problem)


def _leftovers(cfg: Config) -> Iterator[str]:
    """What is set for adapters where there are none."""
    usual = LoraConfig()
    for name in [each.name for each in fields(usual)]:
        if (value := getattr(cfg.lora, name)) != getattr(usual, name):
            yield (
                f"lora.{name}={_shown(value)}, but lora.rank=0 means that there are no adapters; "
                "set lora.rank=16, or choose a recipe such as lora=default"
            )
    if not isinstance(cfg.checkpoint.export, bool):
        yield (
            f"checkpoint.export={cfg.checkpoint.export!r}: there are no adapters, so set it to "
            "true or false"
        )


def _problems(cfg: Config) -> Iterator[str]:
    lora, export = cfg.lora, cfg.checkpoint.export
    if not isinstance(export, bool) and export not in ("adapter", "merged", "both"):
        yield f"checkpoint.export={export!r}: give adapter, merged or both, or true or false"
    for name, given in (("targets", lora.targets), ("train", lora.train)):
        if not all(isinstance(each, str) and each for each in given):
            yield f"lora.{name}={_shown(given)}: give a list of names"
    if not lora.targets:
        yield "lora.targets is empty; give parts such as [attention,mlp], or set lora.rank=0"
    for part in lora.train:
        if part not in SWITCHES:
            yield f"lora.train={_shown(lora.train)}: {part} is not one of {', '.join(SWITCHES)}"
        elif getattr(cfg.model, f"freeze_{part}"):
            yield (
                f"lora.train={_shown(lora.train)} trains what model.freeze_{part}=true keeps as it "
                "is; change one of them"
            )
    if "adapter" in exports(cfg) and (whole := [p for p in lora.train if p != "merger"]):
        yield (
            f"lora.train={_shown(lora.train)}: PEFT's files have no place for the weights of "
            f"{whole[0]} as a whole; set checkpoint.export=merged, or false"
        )


def _shown(value: object) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else f"{value}"
