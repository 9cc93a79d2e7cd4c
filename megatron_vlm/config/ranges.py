"""Range of every number in the configuration."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from megatron_vlm.config.schema import Config, get, key_types
from megatron_vlm.errors import ConfigError

_MAX_INT32 = 2**31 - 1  # counts fit into 32 bits everywhere
_YEAR = 365 * 24 * 60  # minutes


@dataclass(frozen=True)
class Range:
    """Range from `least` to `most`. An open end is itself not allowed."""

    least: float
    most: float = _MAX_INT32
    open_least: bool = False
    open_most: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.least if self.open_least else value >= self.least
        below = value < self.most if self.open_most else value <= self.most
        return above and below  # nan fails both

    def __str__(self) -> str:
        lower = f"more than {self.least}" if self.open_least else f"{self.least}"
        if self.most == _MAX_INT32:
            return lower if self.open_least else f"at least {self.least}"
        if math.isinf(self.most):
            return f"a finite number, {lower}" + " or more" * (not self.open_least)
        return f"{lower} to {'less than ' * self.open_most}{self.most}"


_COUNT, _POSITIVE = Range(0), Range(1)
_RATE = Range(0, math.inf, open_most=True)
_SHARE, _DECAY = Range(0, 1), Range(0, 1, open_most=True)
_KEYS = {
    _COUNT: """
        lora.rank parallel.layers_per_stage data.max_errors data.num_workers optim.warmup_steps
        train.max_nonfinite eval.examples log.profile_steps log.profile_ranks launch.max_restarts
        rl.top_k rl.shown rl.engine_videos serve.full_models
    """,
    _POSITIVE: """
        parallel.tp parallel.pp parallel.ep parallel.cp parallel.virtual_stages
        data.max_tokens data.max_images data.min_pixels data.max_pixels data.prefetch
        data.video_min_frames data.video_min_pixels data.video_max_pixels
        data.shuffle_window train.steps train.global_batch_size train.micro_batch_size
        train.micro_batch_tokens eval.every eval.batch_size eval.samples eval.answer_samples
        eval.max_new_tokens checkpoint.every checkpoint.keep_last checkpoint.keep_every log.every
        launch.processes rl.turns rl.processes rl.samples rl.max_new_tokens rl.max_tokens
        rl.max_rounds rl.updates rl.sampler_rows rl.engine_max_len rl.engine_pictures
        serve.max_rank serve.adapters serve.snapshots serve.full_snapshots serve.sampler_rows
        serve.engine_max_len
    """,
    Range(0, 2**32 - 1): "data.seed train.seed",
    Range(0, 65535): "serve.port",
    _RATE: """
        optim.lr optim.vision_lr optim.merger_lr optim.weight_decay optim.vision_weight_decay
        optim.merger_weight_decay optim.clip_grad launch.cpus_per_rank
        model.router_balance_loss model.router_z_loss
        rl.temperature rl.kl_coef rl.entropy_coef
    """,
    _SHARE: "optim.min_lr_ratio optim.decay_ratio rl.off_policy_steps",
    _DECAY: "optim.beta1 optim.beta2 optim.warmup_ratio lora.dropout",
    Range(0, math.inf, open_least=True, open_most=True): """
        lora.alpha rl.timeout rl.clip_high rl.max_weight serve.lora_alpha serve.save_seconds
        serve.sampling_seconds
    """,
    Range(-1e6, 1e6): "rl.failed_reward",
    Range(0, 1, open_least=True): "optim.eps rl.clip_low rl.top_p",
    Range(0, open_least=True): "train.epochs data.video_fps",
    Range(2): "data.video_max_frames",  # a patch covers two frames
    Range(0, _YEAR, open_least=True): "launch.timeout_minutes",
}
RANGES = {key: allowed for allowed, keys in _KEYS.items() for key in keys.split()}


def check_ranges(cfg: Config) -> None:
    """Refuse a number that is out of its range."""
    for key, allowed in RANGES.items():
        for value in _numbers(get(cfg, key)):
            if value not in allowed:
                raise ConfigError(key=key, found=get(cfg, key), allowed=str(allowed))


def numeric_keys() -> list[str]:
    """Return every key that holds a number or a list of numbers."""
    keys = []
    for key, kind in key_types().items():
        parts = {kind, *get_args(kind)}
        parts |= {inner for part in parts for inner in get_args(part)}
        if parts & {int, float}:
            keys.append(key)
    return keys


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a value. The schema decides whether null is allowed."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif value is not None and not isinstance(value, str):
        yield value
