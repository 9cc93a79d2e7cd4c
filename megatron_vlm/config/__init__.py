"""Configuration: frozen dataclasses that Hydra fills from `configs/` and `key=value`."""

from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.load import (
    config_dir,
    from_yaml,
    known_keys,
    load_config,
    read_saved,
    to_yaml,
)
from megatron_vlm.config.schema import Config

__all__ = [
    "Config",
    "ConfigFile",
    "config_dir",
    "from_yaml",
    "known_keys",
    "load_config",
    "read_saved",
    "to_yaml",
]
