"""Settings of another trainer: from its YAML or JSON file, with their lines, and from its
command. Nothing in a file is run, and no variable in it is read from the environment."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vlm.config.config_file import MAX_CONFIG_BYTES
from megatron_vlm.config.yaml_nodes import MAX_YAML_DEPTH, YamlText
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile, home_path

DATA_FILES = (".yaml", ".yml", ".json")
_OPENED = ("trl", "vllm")  # sections of axolotl whose keys are settings of their own
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


@dataclass(frozen=True)
class Setting:
    """A key of another trainer with its value. Line 0 means that it is in no file."""

    name: str
    value: Any
    line: int = 0
    is_default: bool = False  # the trainer's own default, which nobody has written
    unknown: str = ""  # a reference in the value without an answer in the file


@dataclass
class SourceSettings:
    """Settings of a whole file or command, by name."""

    settings: dict[str, Setting]
    file: str = ""
    command: str = ""  # program and task, such as `swift sft`
    task: str = ""  # the last of these words
    trainer: str = ""  # name of the trainer with this command
    environment: Mapping[str, str] = field(default_factory=dict)  # its variables
    processes: int | None = None  # processes of torchrun, accelerate or deepspeed
    is_dump: bool = False  # every setting of the trainer is there, whether a user gave it or not

    def place(self, setting: Setting) -> str:
        """Return where a setting is."""
        return f"{self.file}, line {setting.line}" if setting.line else self.command or self.file

    def error(self, setting: Setting, problem: str = "", **fields: Any) -> ConfigError:
        """Make the error on a setting, at its place."""
        found = {"key": setting.name, "found": setting.value}
        return ConfigError(problem, place=self.place(setting), **found | fields)


def read_settings_file(file: str) -> SourceSettings:
    """Read a YAML or JSON file of another trainer. Keys of nested sections are joined by dots where
    the trainer nests its settings."""
    text = UntrustedFile(str(home_path(file)), ConfigError).text(MAX_CONFIG_BYTES)
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
    resolved = {name: _resolve(each, found, file) for name, each in found.items()}
    is_dump = is_json and bool({"swift_version", "model_meta", "training_args"} & names)
    return SourceSettings(resolved, file, is_dump=is_dump)


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


def _resolve(setting: Setting, found: Mapping[str, Setting], file: str) -> Setting:
    """Replace ${name} by the value of that setting, as OmegaConf does."""
    value = setting.value
    for _ in range(MAX_YAML_DEPTH):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        if match is None:
            break
        if match[1] in found:
            replacement = found[match[1]].value
        elif match[2] is not None:
            replacement = match[2]
        else:
            break
        is_whole = match.span() == (0, len(value))
        text = replacement if is_whole else str(replacement)
        if not is_whole and (value.count(match[0]) * len(text) + len(value)) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"has more than {MAX_CONFIG_BYTES} letters once its references are replaced",
                place=f"{file}, line {setting.line}",
                key=setting.name,
                remedy="write the value",
            )
        value = text if is_whole else value.replace(match[0], text)
    unknown = value if isinstance(value, str) and "${" in value else ""
    return replace(setting, value=value, unknown=unknown[:80])
