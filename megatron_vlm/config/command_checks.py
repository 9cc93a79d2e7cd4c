"""What `megatron-vlm rl` refuses, also of what every run does."""

from pathlib import Path

from megatron_vlm.config.checks import check_training
from megatron_vlm.config.engine import check_engine
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError


def check_rl(cfg: Config) -> None:
    """Refuse settings from which nothing could be learnt, or that contradict each other."""
    check_training(cfg)
    rl = cfg.rl
    if (rl.reward is None) == (rl.environment is None):
        is_neither = rl.reward is None
        raise ConfigError(
            f"is {'not ' * is_neither}set, and {'neither' if is_neither else 'so'} is "
            "rl.environment",
            key="rl.reward",
            remedy="give one of them, as FILE.py:NAME: a function of a record and an answer, or "
            "the class of an episode",
        )
    _check_target("rl.reward", rl.reward)
    _check_target("rl.environment", rl.environment)
    if any(spec.streaming for spec in cfg.data.train):
        raise ConfigError(
            "is a stream, and prompts are read by their number, so that a run can resume",
            key="data.train",
            remedy="save it as a file, and give that",
        )
    if rl.samples < 2:
        raise ConfigError(
            ": an answer is compared with the others to its prompt",
            key="rl.samples",
            found=rl.samples,
            allowed="at least 2",
        )
    if rl.temperature == 0:
        raise ConfigError(
            ": all answers to a prompt would be the same, and none better than another",
            key="rl.temperature",
            found=0,
            allowed="more than 0",
        )
    _check_clipping(cfg)
    _check_sampler(cfg)
    if rl.updates > cfg.train.global_batch_size:
        raise ConfigError(
            f"exceeds train.global_batch_size={cfg.train.global_batch_size}: each update needs at "
            "least one prompt",
            key="rl.updates",
            found=rl.updates,
        )


def _check_target(key: str, value: str | None) -> None:
    if value is None:
        return
    where, colon, name = value.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(key=key, found=value, allowed="FILE.py:NAME or MODULE:NAME")
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f": there is no file {where}", key=key, found=value)


def _check_clipping(cfg: Config) -> None:
    rl = cfg.rl
    if rl.loss == "importance_sampling" and (rl.clip_low or rl.clip_high):
        raise ConfigError(
            f"clips nothing, and rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}",
            key="rl.loss",
            found=rl.loss,
            remedy="leave them out, or choose rl.loss=ppo",
        )


def _check_sampler(cfg: Config) -> None:
    rl = cfg.rl
    check_engine(cfg, "rl")
    if rl.sampler == "own" and rl.off_policy_steps:
        raise ConfigError(
            "draws samples while a step trains, and with rl.sampler=own the same processes would "
            "do both",
            key="rl.off_policy_steps",
            found=rl.off_policy_steps,
            remedy="give rl.sampler=vllm, or 0",
        )
