"""Checks of the configuration that need nothing but itself: before anything heavy is imported."""

from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError

_CHOICES: dict[str, tuple[str, ...]] = {
    "platform": ("auto", "cuda", "cpu"),
    "launch.backend": ("local", "ray"),
    "model.backend": ("torch", "te"),
    "model.recompute": ("none", "selective", "full"),
    "data.truncation": ("error", "drop", "image_safe"),
    "data.special_tokens": ("refuse", "escape"),
    "data.on_error": ("raise", "skip"),
    "optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "train.precision": ("auto", "fp32", "bf16"),
    "train.on_nonfinite": ("skip", "stop"),
}
_ROLES = ("system", "user", "assistant", "tool")
_TRAIN_ON = ("all_assistant", "last_assistant", "record")
# The least that makes sense; null is allowed where the schema allows it.
_LEAST: dict[str, float] = {
    "data.max_tokens": 1,
    "data.max_images": 1,
    "data.min_pixels": 1,
    "data.max_pixels": 1,
    "data.max_errors": 0,
    "data.num_workers": 0,
    "data.prefetch": 1,
    "data.shuffle_window": 1,
    "optim.lr": 0,
    "optim.vision_lr": 0,
    "optim.merger_lr": 0,
    "optim.weight_decay": 0,
    "optim.clip_grad": 0,
    "optim.warmup_steps": 0,
    "train.steps": 1,
    "train.epochs": 0,
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "train.micro_batch_tokens": 1,
    "train.max_nonfinite": 0,
    "eval.every": 1,
    "eval.batch_size": 1,
    "eval.samples": 1,
    "eval.answer_samples": 1,
    "eval.max_new_tokens": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 1,
    "log.every": 1,
    "launch.processes": 1,
    "launch.max_restarts": 0,
    "launch.cpus_per_rank": 0,
}


def check_values(cfg: Config) -> None:
    """Each value by itself, then those that depend on each other."""
    for key, choices in _CHOICES.items():
        if get(cfg, key) not in choices:
            raise ConfigError(f"{key}={get(cfg, key)!r} is not one of {', '.join(choices)}")
    for key, least in _LEAST.items():
        value = get(cfg, key)
        if value is not None and not value >= least:
            raise ConfigError(f"{key}={value}: give at least {least:g}")
    for key in ("optim.min_lr_ratio", "optim.decay_ratio", "optim.beta1", "optim.beta2"):
        if not 0 <= get(cfg, key) <= 1:
            raise ConfigError(f"{key}={get(cfg, key)}: give 0 to 1")
    chosen = cfg.data.train_on
    listed = isinstance(chosen, list | tuple) and chosen and set(chosen) <= set(_ROLES)
    if chosen not in _TRAIN_ON and not listed:
        raise ConfigError(
            f"data.train_on={chosen!r}: choose one of {', '.join(_TRAIN_ON)}, or a list of roles "
            f"out of {', '.join(_ROLES)}"
        )
    _check_together(cfg)


def _check_together(cfg: Config) -> None:
    data, train, profile = cfg.data, cfg.train, cfg.log.profile_steps
    if data.min_pixels and data.max_pixels and data.min_pixels > data.max_pixels:
        raise ConfigError(
            f"data.min_pixels={data.min_pixels} is above data.max_pixels={data.max_pixels}"
        )
    if train.steps is not None and cfg.optim.warmup_steps > train.steps:
        raise ConfigError(
            f"optim.warmup_steps={cfg.optim.warmup_steps} is above train.steps={train.steps}: the "
            "learning rate would never be reached"
        )
    if profile is not None and (len(profile) != 2 or not 0 <= profile[0] < profile[1]):
        raise ConfigError(f"log.profile_steps={profile}: give [first, last), e.g. [10,12]")
    if cfg.checkpoint.best is not None:
        _check_best(cfg.checkpoint.best, cfg)


def _check_best(best: str, cfg: Config) -> None:
    measured = {"loss": True, "token_accuracy": True, "exact_match": cfg.eval.generate}
    measured["ranking"] = cfg.eval.candidates is not None
    name, _, score = best.rpartition("/")
    if not name or not measured.get(score):
        raise ConfigError(
            f"checkpoint.best={best!r}: give SET/SCORE with a score that is measured: "
            f"{', '.join(score for score, is_on in measured.items() if is_on)}; exact_match takes "
            "eval.generate=true, ranking takes eval.candidates"
        )


def get(cfg: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value
