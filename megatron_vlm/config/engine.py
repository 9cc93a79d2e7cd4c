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
            f"{group}.sampler=vllm needs {group}.engine, the Python of an environment that has "
            "vLLM, such as .venv-vllm/bin/python after `make vllm-env`"
        )
    if keys.sampler == "own" and (keys.engine is not None or keys.engine_gpus):
        _refuse_unused(group)
    if not isinstance(keys.engine_options, dict):
        raise ConfigError(f"{group}.engine_options={keys.engine_options!r}: give {{NAME: VALUE}}")
    if keys.sampler == "own" and keys.engine_options:
        _refuse_unused(group)
    if keys.sampler == "vllm" and cfg.data.add_tokens:
        raise ConfigError(
            f"{group}.sampler=vllm with data.add_tokens: an engine begins with model.path, which "
            f"lacks them; export a model that has them first, or choose {group}.sampler=own"
        )
    rank, key = cfg.serve.max_rank, "serve.max_rank"
    if group == "rl":
        rank, key = cfg.lora.rank, "lora.rank"
    if keys.sampler == "vllm" and rank > MOST_LORA_RANK:
        raise ConfigError(
            f"{group}.sampler=vllm with {key}={rank}: vLLM takes adapters of rank {MOST_LORA_RANK} "
            f"at most; give at most that, or choose {group}.sampler=own"
        )


def _refuse_unused(group: str) -> None:
    raise ConfigError(
        f"{group}.sampler=own starts no engine, and {group}.engine, {group}.engine_gpus or "
        f"{group}.engine_options is set; give {group}.sampler=vllm, or leave them out"
    )
