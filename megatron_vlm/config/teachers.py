"""Values of rl.teacher: one teacher for all prompts, or one for each source of prompts."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.config.schema import OWN, Config, RlConfig
from megatron_vlm.errors import ConfigError

ALL_SOURCES = ""  # the name of the only teacher


def teachers_of(value: Any) -> dict[str, str]:
    """Return the path of the teacher of each source, by the source's name. A teacher of all sources
    has the name ALL_SOURCES."""
    if value is None:
        return {}
    return {ALL_SOURCES: value} if isinstance(value, str) else dict(value)


def check_teacher(cfg: Config) -> None:
    """Refuse a teacher that cannot be found, or settings of a teacher that there is not."""
    rl = cfg.rl
    if rl.teacher is None:
        _refuse_unused(cfg)
        return
    named = rl.teacher if isinstance(rl.teacher, Mapping) else {"all": rl.teacher}
    if not named or not all(
        isinstance(each, str) and each for pair in named.items() for each in pair
    ):
        raise ConfigError(
            key="rl.teacher",
            found=rl.teacher,
            allowed="a checkpoint's folder, its name on the Hub, or {SOURCE: CHECKPOINT, ...}",
        )
    _check_engines(cfg)
    if rl.teacher_top_k and rl.entropy_coef is not None:
        raise ConfigError(
            ": with rl.teacher_top_k the head computes the divergence from the teacher instead",
            key="rl.entropy_coef",
            found=rl.entropy_coef,
            remedy="set rl.entropy_coef=null, or rl.teacher_top_k=0",
        )


def _refuse_unused(cfg: Config) -> None:
    for name, default in vars(RlConfig()).items():
        value = getattr(cfg.rl, name)
        if name.startswith("teacher_") and value != default:
            raise ConfigError(
                "belongs to rl.teacher, which is not set",
                key=f"rl.{name}",
                found=value,
                remedy="give rl.teacher=CHECKPOINT, or leave it out",
            )


def _check_engines(cfg: Config) -> None:
    """Refuse engines that could not be started, or settings of engines that are not started."""
    rl = cfg.rl
    if not isinstance(rl.teacher_options, dict):
        raise ConfigError(
            key="rl.teacher_options", found=rl.teacher_options, allowed="{NAME: VALUE}"
        )
    if rl.teacher_scorer == OWN:
        if rl.teacher_gpus or rl.teacher_options:
            raise ConfigError(
                "starts no engine, and rl.teacher_gpus or rl.teacher_options is set",
                key="rl.teacher_scorer",
                found="own",
                remedy="give rl.teacher_scorer=vllm, or leave them out",
            )
        return
    count = len(set(teachers_of(rl.teacher).values()))
    if len(rl.teacher_gpus) % count:
        raise ConfigError(
            f"has {len(rl.teacher_gpus)} engines for {count} teachers, which get equal shares",
            key="rl.teacher_gpus",
            found=list(rl.teacher_gpus),
            remedy=f"give a multiple of {count}, the engines of the first teacher first",
        )
