"""Settings of another trainer's configuration, each with its line. Nothing in the file is run, and
no variable of the environment is read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.config.yaml_nodes import MAX_YAML_DEPTH, YamlText
from megatron_vlm.errors import ConfigError

_OPENED = ("trl", "vllm")  # sections of axolotl whose keys are settings of their own
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


@dataclass(frozen=True)
class Setting:
    """A key of another trainer with its value. Line 0 is a default of that trainer."""

    name: str
    value: Any
    line: int = 0
    variable: str = ""  # name of a variable in the value, which is not known


@dataclass
class SourceSettings:
    """Settings of a whole file, by name."""

    file: str
    settings: dict[str, Setting]
    command: str = ""  # the trainer's command in a shell script, such as `swift sft`
    environment: dict[str, Setting] = field(default_factory=dict)  # variables set in a script
    is_dump: bool = False  # every setting of the trainer is there, whether a user gave it or not

    def error(self, setting: Setting, problem: str = "", **fields: Any) -> ConfigError:
        """Make the error on a setting, at its line."""
        place = f"{self.file}, line {setting.line}" if setting.line else self.file
        found = {"key": setting.name, "found": setting.value}
        return ConfigError(problem, place=place, **found | fields)


def read_yaml_settings(text: str, file: str, variables: Mapping[str, str]) -> SourceSettings:
    """Read a YAML or JSON text. Keys of nested sections are joined by dots where the trainer nests
    its settings."""
    document = YamlText(file, keeps_variables=True)
    is_json = text.lstrip().startswith("{")
    root = document.root(text.replace("\t", " ") if is_json else text)
    if root is None or not root.tag.endswith(":map"):
        raise ConfigError(
            "is empty" if root is None else "is not a mapping",
            place=file,
            remedy="give the configuration of a trainer",
        )
    names = {key.value for key, _ in root.value if isinstance(key.value, str)}
    opens_all = "actor_rollout_ref" in names
    found = dict(_settings(document, root, "", opens_all))
    resolved = {name: _resolve(each, found, variables) for name, each in found.items()}
    is_dump = is_json and bool({"swift_version", "model_meta", "training_args"} & names)
    return SourceSettings(file, resolved, is_dump=is_dump)


def _settings(
    document: YamlText, node: Any, before: str, opens_all: bool, depth: int = 0
) -> Iterator[tuple[str, Setting]]:
    for key, value in document.pairs(node):
        name = f"{before}{key.value}"
        is_section = value.tag.endswith(":map") and bool(value.value)
        if is_section and depth < MAX_YAML_DEPTH and (opens_all or name in _OPENED):
            yield from _settings(document, value, f"{name}.", opens_all, depth + 1)
        else:
            yield name, Setting(name, document.value(value), key.start_mark.line + 1)


def _resolve(
    setting: Setting, found: Mapping[str, Setting], variables: Mapping[str, str]
) -> Setting:
    """Replace ${name} by the value of that setting, as OmegaConf does, or by that of --set."""
    value = setting.value
    for _ in range(MAX_YAML_DEPTH):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        if match is None:
            break
        name, other = match[1], match[2]
        if name in variables:
            replacement: Any = variables[name]
        elif name in found:
            replacement = found[name].value
        elif other is not None:
            replacement = other
        else:
            return Setting(setting.name, value, setting.line, name)
        is_whole = match.span() == (0, len(value))
        value = replacement if is_whole else value.replace(match[0], str(replacement))
    unknown = isinstance(value, str) and "${" in value
    return Setting(setting.name, value, setting.line, value[:80] if unknown else "")
