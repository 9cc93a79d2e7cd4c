"""Errors of Hydra and OmegaConf in one sentence, and values of groups that are no recipes."""

import re
from dataclasses import fields
from typing import Literal, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, ValidationError

from megatron_vlm.config.group_values import recipe_error, recipes_of
from megatron_vlm.config.schema import MAPPINGS, setting_types
from megatron_vlm.errors import ConfigError

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
