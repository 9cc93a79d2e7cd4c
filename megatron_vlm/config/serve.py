"""What `megatron-vlm serve` refuses before anything is started."""

from pathlib import Path

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.validate import require
from megatron_vlm.errors import ConfigError


def check_serve(cfg: Config) -> None:
    """Refuse settings that a service cannot have, or that would be read and not used."""
    serve = cfg.serve
    if cfg.lora != LoraConfig():
        raise ConfigError(
            "lora.*: clients say what adapters their models have; leave it out, and see "
            "serve.lora_alpha and serve.max_rank"
        )
    for name in ("train", "eval"):
        if getattr(cfg.data, name):
            raise ConfigError(f"data.{name} is set, and clients send the data; leave it out")
    for name, least in (
        ("port", 0),
        ("max_rank", 1),
        ("adapters", 1),
        ("full_models", 0),
        ("snapshots", 1),
        ("full_snapshots", 1),
        ("sampler_rows", 1),
        ("save_seconds", 1),
    ):
        if (value := getattr(serve, name)) < least:
            raise ConfigError(f"serve.{name}={value} must be at least {least}")
    if serve.port > 65535:
        raise ConfigError(f"serve.port={serve.port} must be at most 65535")
    if serve.lora_alpha <= 0:
        raise ConfigError(f"serve.lora_alpha={serve.lora_alpha} must be above 0")
    if serve.keys is not None and not Path(serve.keys).is_file():
        raise ConfigError(
            f"serve.keys={serve.keys}: there is no such file; make it with megatron-vlm serve-key "
            f"NAME {serve.keys}"
        )
    require(cfg, "model.path")
