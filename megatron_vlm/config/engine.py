"""What is refused of the keys of engines beside the trainer, which `rl` and `serve` both have."""

from typing import Literal

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError

MOST_LORA_RANK = 512  # that vLLM takes


def check_engine(cfg: Config, group: Literal["rl", "serve"]) -> None:
    """Refuse an engine that could not be started, or settings of one that nobody starts."""
    keys = cfg.rl if group == "rl" else cfg.serve
    if keys.sampler == "vllm" and keys.engine is None:
        raise ConfigError(
            f"is not set, and {group}.sampler=vllm needs it",
            key=f"{group}.engine",
            remedy="give the Python of an environment that has vLLM, such as "
            ".venv-vllm/bin/python after `make vllm-env`",
        )
    if keys.sampler == "own" and (keys.engine is not None or keys.engine_gpus):
        _refuse_unused(group)
    if not isinstance(keys.engine_options, dict):
        raise ConfigError(
            key=f"{group}.engine_options", found=keys.engine_options, allowed="{NAME: VALUE}"
        )
    if keys.sampler == "own" and keys.engine_options:
        _refuse_unused(group)
    if keys.sampler == "vllm" and cfg.data.add_tokens:
        raise ConfigError(
            "starts an engine from model.path, which lacks the tokens of data.add_tokens",
            key=f"{group}.sampler",
            found="vllm",
            remedy=f"export a model that has them first, or choose {group}.sampler=own",
        )
    rank, key = cfg.serve.max_rank, "serve.max_rank"
    if group == "rl":
        rank, key = cfg.lora.rank, "lora.rank"
    if keys.sampler == "vllm" and rank > MOST_LORA_RANK:
        raise ConfigError(
            f"exceeds the rank that vLLM takes, with {group}.sampler=vllm",
            key=key,
            found=rank,
            allowed=range(1, MOST_LORA_RANK + 1),
            remedy=f"give at most {MOST_LORA_RANK}, or choose {group}.sampler=own",
        )


def _refuse_unused(group: str) -> None:
    raise ConfigError(
        f"starts no engine, and {group}.engine, {group}.engine_gpus or {group}.engine_options is "
        "set",
        key=f"{group}.sampler",
        found="own",
        remedy=f"give {group}.sampler=vllm, or leave them out",
    )
