"""What `megatron-vlm serve` refuses before anything is started."""

from pathlib import Path

from megatron_vlm.config.engine import check_engine
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
    if serve.keys is not None and not Path(serve.keys).is_file():
        raise ConfigError(
            f"serve.keys={serve.keys}: there is no such file; make it with megatron-vlm serve-key "
            f"NAME {serve.keys}"
        )
    check_engine(cfg, "serve")
    require(cfg, "model.path")
