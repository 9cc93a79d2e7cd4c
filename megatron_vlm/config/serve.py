"""What `megatron-vlm serve` refuses before anything is started."""

from pathlib import Path

from megatron_vlm.config.checks import require
from megatron_vlm.config.engine import check_engine
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.errors import ConfigError


def check_serve(cfg: Config) -> None:
    """Refuse settings that a service cannot have, or that would be read and not used."""
    serve = cfg.serve
    for name, usual in vars(LoraConfig()).items():
        if (value := getattr(cfg.lora, name)) != usual:
            raise ConfigError(
                ": clients choose the adapters of their models",
                key=f"lora.{name}",
                found=value,
                remedy="leave it out, and see serve.lora_alpha and serve.max_rank",
            )
    for name in ("train", "eval"):
        if getattr(cfg.data, name):
            raise ConfigError(
                "is set, and clients send the data", key=f"data.{name}", remedy="leave it out"
            )
    if serve.keys is not None and not Path(serve.keys).is_file():
        raise ConfigError(
            ": there is no such file",
            key="serve.keys",
            found=serve.keys,
            remedy=f"make it with megatron-vlm serve-key NAME {serve.keys}",
        )
    check_engine(cfg, "serve")
    require(cfg, "model.path")
