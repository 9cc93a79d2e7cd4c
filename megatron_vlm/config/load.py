"""Loading of the configuration: Hydra fills the dataclasses of schema.py from `configs/` and
`key=value`.
Their errors, and groups whose value is no recipe, are explained in one sentence."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.config_file import MAX_YAML_DEPTH, ConfigFile, version_remedy
from megatron_vlm.config.data_sources import parse_sets, parse_sources, plain_sets, plain_sources
from megatron_vlm.config.key_hints import (
    config_dir,
    group_names,
    recipe_error,
    recipes_of,
    unknown_key_error,
)
from megatron_vlm.config.schema import MAPPINGS, Config, get, key_types, setting_types
from megatron_vlm.config.searched_keys import SEARCHED, check_auto, without_given
from megatron_vlm.errors import NOT_GIVEN, ConfigError, gather_errors, show_choices, show_value
from megatron_vlm.io.hub import beside_run
from megatron_vlm.io.untrusted import UntrustedFile

# Words for the types of values that OmegaConf converts.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def recipe_errors(group: str, value: str) -> list[ConfigError]:
    """Return the errors on values of a group that Hydra would not explain: a path, which it takes
    for a recipe in a folder, or no name at all."""
    is_list = value.startswith("[") and value.endswith("]")
    names = value[1:-1].split(",") if is_list else [value]
    names = [name.strip().strip("'\"") for name in names]
    return [recipe_error(group, name) for name in names if name not in recipes_of(group)]


def explain(error: Exception) -> ConfigError:
    """Translate an error of Hydra or OmegaConf into one sentence."""
    if isinstance(error, OverflowError) and (named := re.search(r"full_key: (\S+)", str(error))):
        return ConfigError("has a number that is too large", key=named[1], allowed="a smaller one")
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").partition("/")
        return recipe_error(group, name)
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.lstrip("+~").partition("=")
        return _unreadable(key, value)
    if "Ambiguous value" in str(error):  # Hydra takes a,b for two runs
        key, _, value = str(error).partition("argument '")[2].partition("'")[0].partition("=")
        return _unreadable(key, value)
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        return ConfigError("is not set", key=key, remedy=f"give it as {key}=VALUE")
    full_key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    first_line = str(error.__cause__ or error).splitlines()[0]
    full_key = str(full_key or "configuration")
    if isinstance(error.__cause__ or error, ValidationError) and full_key in setting_types():
        return _wrong_type(full_key, first_line)
    mapping, _, name = full_key.rpartition(".")
    if mapping in MAPPINGS and full_key not in setting_types():
        return ConfigError(f"has no {name}", key=mapping, allowed=_settings_of(mapping))
    return ConfigError(f": {first_line}", key=full_key)


def _wrong_type(key: str, text: str) -> ConfigError:
    """Return the error on a value of another type. `text`: what OmegaConf says about it."""
    value = re.search(r"(?:Value|to string:) '(.*)'(?: of type| is not|$)", text)
    kind = setting_types()[key]
    if key in MAPPINGS:
        return ConfigError("is not a mapping", key=key, allowed=_settings_of(key))
    choices = get_args(kind) if get_origin(kind) is Literal else None
    parts = {kind, *get_args(kind)}
    return ConfigError(
        key=key,
        found=value[1] if value else None,
        allowed=choices or " or ".join(word for part, word in _KINDS.items() if part in parts),
    )


def _settings_of(key: str) -> str:
    return (
        f"{{NAME: VALUE}} with names from {', '.join(item.name for item in fields(MAPPINGS[key]))}"
    )


def _unreadable(key: str, value: str) -> ConfigError:
    remedy = (
        "put values with signs such as < or & in double quotes, and for the shell single ones "
        """around it all: 'KEY=["<a>","<b>"]'"""
    )
    if value.endswith(","):
        remedy = f"remove the comma at its end: {key}={value.rstrip(',')}"
    elif "," in value and not re.search(r"[\[\](){}<>&\"']", value):
        remedy = (
            f"""put text with a comma in quotes, '{key}="{value}"', and several values in """
            f"brackets, '{key}=[{value}]'"
        )
    return ConfigError("cannot be read", key=key, found=value, remedy=remedy)


_PRIMARY = "train"  # configs/train.yaml
_TOO_MANY_DIGITS = re.compile(r"\d{4301}")  # Python reads no such number
_MAX_SAVED_BYTES = 2**20  # maximum bytes of a config.yaml
_MAX_LETTERS = 2**15  # in all overrides: Hydra reads a list in the square of its length


def load_config(overrides: Sequence[str], file: ConfigFile | None = None) -> Config:
    """Compose the recipes, the file of --config and the `key=value` overrides into a checked
    Config. Each overrides the previous one."""
    _check_keys(overrides)
    if file is not None and file.is_complete:
        _refuse_recipes(overrides)
    _store_schema()
    composed = [*_recipes_of(file), *map(_plain_override, overrides)]
    GlobalHydra.instance().clear()
    with _explain_errors(file, overrides):
        name = _PRIMARY
        if file is not None:
            name, values = "own_file", file.values_by_group()
            OmegaConf.merge(OmegaConf.structured(_schema_class()), values)  # checks the types
            ConfigStore.instance().store(
                name=name, node={"defaults": [_PRIMARY, "_self_"], **values}
            )
        with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
            cfg = _build_config(compose(name, overrides=composed))
        cfg = without_given(cfg, overrides, () if file is None else [*file.values])
        check_auto(cfg)
    return cfg


def to_yaml(cfg: Config) -> str:
    """Return the resolved configuration as YAML, as a run and each checkpoint store it."""
    values = asdict(cfg)
    values["data"] |= {"train": plain_sources(cfg.data.train), "eval": plain_sets(cfg.data.eval)}
    return str(OmegaConf.to_yaml(OmegaConf.create(values)))


def from_yaml(text: str, overrides: Sequence[str] = (), file: ConfigFile | None = None) -> Config:
    """Parse a Config that `to_yaml` wrote, with changed keys. Recipes are not composed again."""
    _check_keys(overrides)
    _refuse_recipes([*_recipes_of(file), *overrides])
    _refuse_variables(text, "config.yaml")
    with _explain_errors(file, overrides):
        changes = OmegaConf.from_dotlist([_plain_override(override) for override in overrides])
        schema = OmegaConf.structured(_schema_class())
        values = {} if file is None else file.values_by_group()
        cfg = _build_config(OmegaConf.merge(schema, OmegaConf.create(text), values, changes))
        check_auto(cfg)
    return cfg


def read_saved(
    folder: Path, overrides: Sequence[str] = (), file: ConfigFile | None = None
) -> Config:
    """Read the config.yaml of a run or of a checkpoint, with changes as in `from_yaml`."""
    remedy = "give a run or a checkpoint of this version"
    saved = UntrustedFile(str(folder / "config.yaml"), ConfigError, remedy)
    text = saved.text(_MAX_SAVED_BYTES)
    with saved.wrap_errors("not a configuration"):
        try:
            cfg = from_yaml(text)
        except ConfigError as error:
            ConfigFile.parse(text, saved.name)  # names all keys of another version
            default_remedy = "" if error.allowed is None else f"give {show_choices(error.allowed)}"
            first = error.remedy or default_remedy
            remedy = "; ".join(filter(None, (first, version_remedy(folder))))
            fields = error.within(saved.name).fields() | {"remedy": remedy}
            raise ConfigError(**fields) from error
    if overrides or file:
        cfg = from_yaml(text, overrides, file)
    return replace(cfg, model=replace(cfg.model, path=beside_run(cfg.model.path, folder)))


def _refuse_recipes(overrides: Sequence[str]) -> None:
    for override in overrides:
        if is_dataclass(key_types().get(key := _key(override))):
            raise ConfigError(
                ": this configuration is complete, so recipes cannot be chosen",
                key=key,
                found=override.partition("=")[2] if "=" in override else NOT_GIVEN,
                remedy=f"give single keys, such as {key}.KEY=VALUE",
            )


def _recipes_of(file: ConfigFile | None) -> list[str]:
    """Return the recipes as on the command line, where the last one of a group has priority."""
    return [] if file is None else [f"{group}={name}" for group, name in file.recipes.items()]


@contextmanager
def _explain_errors(file: ConfigFile | None, overrides: Sequence[str]) -> Iterator[None]:
    """Raise errors in one sentence, with the line of the file that caused them."""
    try:
        yield
    except ConfigError as error:
        if file is None:
            raise
        raise file.blame(error, overrides) from error
    except (HydraException, OmegaConfBaseException, YAMLError, OverflowError) as error:
        explained = explain(error)
        raise (file.blame(explained, overrides) if file else explained) from error


@cache
def _schema_class() -> Any:
    return _as_omegaconf_class(Config)


@cache
def _store_schema() -> None:
    """Store the schema under the name that configs/train.yaml has for it."""
    ConfigStore.instance().store(name="schema", node=_schema_class())


def _as_omegaconf_class(cls: Any) -> Any:
    """Return a class of the schema in a form that OmegaConf can fill. OmegaConf has no Literal, so
    such a field becomes a string. A value that YAML spells in several ways, as it does a tuple,
    becomes Any."""
    composable_fields: list[Any] = []
    kinds = get_type_hints(cls)  # without bounds
    for item in fields(cls):
        kind: Any = kinds[item.name]
        default: Any = None if item.default == () else item.default
        with_default: Any = field(default=default, default_factory=item.default_factory)
        if is_dataclass(kind):
            kind = _as_omegaconf_class(kind)
            with_default = field(default_factory=kind)
        elif get_origin(kind) is Literal:
            kind = str
        elif (
            get_origin(kind) is tuple
            or any(get_origin(part) in (tuple, Literal, dict) for part in get_args(kind))
            or {int, str} <= {*get_args(kind)}
        ):
            kind = Any
        elif get_origin(kind) is dict:  # a dict with any keys may have no default in Hydra
            kind, with_default = Any, field(default=None)
        composable_fields.append((item.name, kind, with_default))
    return make_dataclass(cls.__name__, composable_fields)


def _build_config(composed: Any) -> Config:
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    for key, kind in key_types().items():
        group, _, name = key.rpartition(".")
        if group:
            values[group][name] = _as_declared(key, kind, values[group][name])
    values |= {name: key_types()[name](**values[name]) for name in group_names()}
    cfg = Config(**values)
    check_values(cfg)
    return cfg


def _as_declared(key: str, kind: Any, value: Any) -> Any:
    """Return a value that OmegaConf has read in the type of its key: lists, or a single item,
    as tuples, and null as an empty mapping. checks.py refuses other values."""
    if key == "data.train":
        return parse_sources(value, key)
    if key == "data.eval":
        return parse_sets(value)
    if key == "parallel.auto" and value == "all":
        return SEARCHED
    if key in MAPPINGS:
        return MAPPINGS[key](**value)
    if get_origin(kind) is dict:
        return {} if value is None else value
    if get_origin(kind) is tuple:
        return tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if isinstance(value, list) and any(get_origin(part) is tuple for part in get_args(kind)):
        return tuple(map(str, value))
    return value


def known_keys() -> list[str]:
    """Return every key of the configuration in dotted form, groups included."""
    return list(key_types())


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


def given_keys(overrides: Sequence[str], file: ConfigFile | None = None) -> set[str]:
    """Return the keys and groups that are set on the command line or in a file."""
    return {*map(_key, overrides), *(file.values if file is not None else ())}


def _plain_override(override: str) -> str:
    """Return an override as KEY=VALUE. Every key exists, so +key=value equals key=value, and ~key
    restores the default. Hydra handles groups."""
    key = _key(override)
    if override[0] not in "+~" or is_dataclass(key_types().get(key, Config)):
        return override
    if override[0] == "+":
        return override.lstrip("+")
    default = get(_schema_class()(), key)
    if isinstance(default, tuple):
        default = list(default)
    if key in MAPPINGS:
        settings = asdict(default).items()
        default = f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in settings)}}}"
    return f"{key}={'null' if default is None else default}"


def _check_keys(overrides: Sequence[str]) -> None:
    """Refuse overrides of unknown keys, all at once, with the key that was most likely meant."""
    if (letters := sum(map(len, overrides))) > _MAX_LETTERS:
        raise ConfigError(
            f": all settings together have {letters:,} letters, and at most {_MAX_LETTERS:,} are "
            "read here",
            key=show_value(_key(max(overrides, key=len))),
            remedy="write long lists into a file for --config, or as a glob in quotes",
        )
    keys = known_keys()
    refused: list[ConfigError] = []
    for override in overrides:
        key = _key(override)
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(": settings are given as KEY=VALUE", key=show_value(override))
        if key not in keys:
            refused.append(unknown_key_error(key))
            continue
        _check_text(override, key)
        if "=" in override and is_dataclass(key_types()[key]):
            refused += recipe_errors(key, override.partition("=")[2])
    if refused:
        raise gather_errors(refused)


def _check_text(override: str, key: str) -> None:
    """Refuse what Hydra would replace, and values that parsers cannot read."""
    _refuse_variables(override, key=key)
    depth = deepest = 0
    for character in override:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    if deepest > MAX_YAML_DEPTH:
        raise ConfigError(
            f"is nested deeper than {MAX_YAML_DEPTH} levels, so it is no value", key=key
        )
    if _TOO_MANY_DIGITS.search(override.replace("_", "")):
        raise ConfigError("has a number of more than 4,300 digits, which is no value", key=key)


def _refuse_variables(text: str, place: str = "", key: str = "") -> None:
    """Refuse ${...}: the value of ${oc.env:NAME} may be a token, and a run stores it."""
    if "${" in text:
        raise ConfigError(
            ": ${...} is not replaced",
            place=place,
            key=key,
            remedy='write the value, or let the shell replace it: run="$FOLDER"',
        )
