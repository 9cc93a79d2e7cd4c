"""The one configuration: the dataclasses of schema.py, filled by Hydra from `configs/` and
`key=value`."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from megatron_vlm.config.schema import Config
from megatron_vlm.config.validate import check_values, get
from megatron_vlm.errors import ConfigError


def config_dir() -> Path:
    """The folder of YAML files: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load_config(overrides: Sequence[str], config_name: str = "train") -> Config:
    """Compose `configs/<config_name>.yaml` and `key=value` overrides into a checked Config."""
    _check_keys(overrides)
    overrides = [_plain(override) for override in overrides]
    ConfigStore.instance().store(name="schema", node=_schema())
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
            composed = compose(config_name, overrides=list(overrides))
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, Config)
    check_values(config)
    return config


def to_yaml(cfg: Config) -> str:
    """The resolved configuration, as it is kept with a run and with each checkpoint."""
    return str(OmegaConf.to_yaml(OmegaConf.structured(cfg)))


def from_yaml(text: str, overrides: Sequence[str] = ()) -> Config:
    """A Config that `to_yaml` wrote, with single keys changed; recipes are not composed again."""
    _check_keys(overrides)
    for override in overrides:
        if "." not in (key := override.split("=")[0]) and key in _groups():
            raise ConfigError(
                f"{override}: this configuration is complete, recipes cannot be chosen any more; "
                f"give single keys, such as {key}.KEY=VALUE"
            )
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
        merged = OmegaConf.merge(_schema(), OmegaConf.create(text), changes)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, Config)
    check_values(config)
    return config


def _schema() -> DictConfig:
    """The dataclasses as Hydra's schema. OmegaConf makes frozen ones read-only, but composing has
    to fill them in; the objects that `load_config` returns are frozen again."""
    schema = OmegaConf.structured(Config)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, False)
    return schema


def _groups() -> list[str]:
    return [item.name for item in fields(Config) if is_dataclass(item.type)]


def known_keys(node: Any = Config, prefix: str = "") -> list[str]:
    """Every key of the configuration in dotted form."""
    keys = []
    for item in fields(node):
        keys.append(prefix + item.name)
        if is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def _plain(override: str) -> str:
    """Every key is there already: +key=value sets it as key=value does, and ~key puts its default
    back. Groups are Hydra's."""
    key = override.lstrip("+~").split("=")[0]
    if "." in key and override.startswith("+"):
        return override.lstrip("+")
    if "." in key and override.startswith("~"):
        default = get(Config(), key)
        return f"{key}={'null' if default is None else default}"
    return override


def _check_keys(overrides: Sequence[str]) -> None:
    """Refuse an override of a key that does not exist, with the nearest one that does."""
    keys = known_keys()
    for override in overrides:
        key = re.split("=", override.lstrip("+~"), maxsplit=1)[0]
        if key not in keys and not key.startswith("hydra"):
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key!r} is not a configuration key{hint}")


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, without their layers."""
    if isinstance(error, MissingConfigException):
        return f"{error.missing_cfg_file} is no recipe; there are {', '.join(error.options or [])}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is not set; give it as {error.full_key}=VALUE"
    full_key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    first_line = str(error.__cause__ or error).splitlines()[0]
    return f"{full_key or 'configuration'}: {first_line}"
