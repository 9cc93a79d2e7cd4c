"""Settings of another trainer: from its YAML or JSON file, with their lines, and from its command,
whose words the shell has split. Nothing in a file is run, and no variable in it is read from the
environment."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vlm.config.config_file import MAX_CONFIG_BYTES, MAX_YAML_DEPTH, YamlText
from megatron_vlm.errors import ConfigError, show_value
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


_TRL = "sft|dpo|kto|orpo|cpo|grpo|rloo|reward"
# A word of the program, and the word after it. The groups are the program and its task.
_PROGRAMS = {
    "ms-swift": (
        r"(?:.*/)?(swift|megatron)\n(sft|pt|rlhf)|()swift[./]cli[./]main(?:\.py)?\n(sft|pt|rlhf)",
        r"(?:.*[./])?swift[./]cli[./]_?(megatron|)[./]?(sft|pt|rlhf)(?:\.py)?\n.*",
    ),
    "trl": (
        rf"(?:.*/)?(trl)\n({_TRL})",
        rf"(?:(?:.*/)?()({_TRL})(?:_\w+)?\.py|()trl\.scripts\.({_TRL})(?:_\w+)?)\n.*",
    ),
    "llamafactory": (
        r"(?:.*/)?(llamafactory-cli|lmf|llamafactory\.cli)\n(train)",
        r"((?:.*/)?src/train|(?:.*/)?llamafactory/launcher)()\.py\n.*",
    ),
    "axolotl": (r"(?:.*/)?(axolotl)\n(train)", r"(axolotl\.cli\.train)()\n.*"),
    "verl": (r"((?:[\w.]+\.)?main_\w+|(?:.*/)?main_\w+\.py)()\n.*",),
    "qwen-vl-finetune": (r"(?:.*[./])?(train_qwen)()(?:\.py)?\n.*",),
}
_ONE_VALUE = ("axolotl", "verl")  # an option has one value at most; others take lists
_MAX_WORDS = 4000
_REMEDY = (
    "give a YAML or JSON file, or write `megatron-vlm import` in front of llamafactory-cli train, "
    "swift sft, megatron sft, trl sft, axolotl train, train_qwen.py or python -m "
    "verl.trainer.main_ppo, with its launcher and its arguments"
)


def read_command(words: Sequence[str], environment: Mapping[str, str]) -> SourceSettings:
    """Return the settings of a training command, and of the YAML file that it names. Words before
    the program are its launcher and its variables."""
    if len(words) > _MAX_WORDS:
        remedy = "write long lists of data into a file of their own, or as a glob in quotes"
        problem = f"is followed by {len(words)} words, and at most {_MAX_WORDS} are read"
        raise ConfigError(problem, key="import", remedy=remedy)
    trainer, program, task, place = _find_program(words)
    count = 2 if task and words[place + 1 : place + 2] == [task] else 1
    name = f"{program or trainer.removeprefix('ms-')} {task}".rstrip()
    given, files = _arguments(trainer, name, words[place + count :])
    if "config" in given and trainer in ("ms-swift", "trl"):
        files.append(str(given.pop("config").value))
    if len(files) > 1:
        raise ConfigError(f"names the files {' and '.join(files)}", place=name, remedy="give one")
    source = read_settings_file(files[0]) if files else SourceSettings({})
    source.settings |= given
    source.command, source.task, source.trainer = name, task, trainer
    before = [word.partition("=") for word in words[:place] if re.match(r"[A-Za-z_]\w*=", word)]
    source.environment = {**environment, **{each[0]: each[2] for each in before}}
    source.processes = _processes(words[:place])
    if file := dict(_named(words[:place])).get("config_file"):  # accelerate has it
        source.settings["config_file"] = Setting("config_file", file)
    return source


def _find_program(words: Sequence[str]) -> tuple[str, str, str, int]:
    """Return the trainer, its program, its task and the place of the program among the words."""
    for place, word in enumerate(words):
        text = "\n".join([word, *words[place + 1 : place + 2]])
        text = text if "\n" in text else f"{text}\n"
        for trainer, forms in _PROGRAMS.items():
            for form in forms:
                if match := re.fullmatch(form, text, re.DOTALL):
                    program, task = [each for each in match.groups() if each is not None][-2:]
                    return trainer, program.rpartition("/")[2], task, place
    where = words[0] if len(words) == 1 else ""
    raise ConfigError(": this is no training command that is known", place=where, remedy=_REMEDY)


def _arguments(
    trainer: str, command: str, words: Sequence[str]
) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings of --NAME VALUE, --NAME=VALUE and KEY=VALUE, the last of each name, and
    the YAML files among the words."""
    found: dict[str, Setting] = {}
    files = []
    place, name = 0, ""
    while place < len(words):
        word, place = words[place], place + 1
        if word.startswith("--") and word != "--":
            name, equals, joined = word.removeprefix("--").partition("=")
            values = [joined] if equals else []
            most = 1 if trainer in _ONE_VALUE else len(words)
            while place < len(words) and len(values) < most and not equals:
                if words[place].startswith("--"):
                    break
                values, place = [*values, words[place]], place + 1
            name = name.replace("-", "_")
            found[name] = Setting(name, _value_of_option(values))
        elif match := re.match(r"\+{0,2}([\w.@/-]+)=", word):
            found[match[1]] = Setting(match[1], _plain_value(word[match.end() :]))
        elif word.lower().endswith(DATA_FILES):
            files.append(word)
        elif word not in ("", "--") and not word.startswith("~"):
            raise ConfigError(
                f": {show_value(word, name)} is not an option",
                place=command,
                remedy="write it as --NAME VALUE or KEY=VALUE",
            )
    return found, files


def _value_of_option(values: list[str]) -> Any:
    """Return the value of an option: true without one, and a list of several."""
    if len(values) > 1:
        return [text.strip(",") for text in values]
    return values[0] if values else True


def _plain_value(text: str) -> Any:
    """Return the value of an override. Text that is no YAML stays as it is."""
    try:
        document = YamlText("", keeps_variables=True)
        node = document.root(text)
        return None if node is None else document.value(node)
    except ConfigError:
        return text


def _processes(words: Sequence[str]) -> int | None:
    """Return the processes that the launcher starts in all, or None if it does not say."""
    given = dict(_named(words))
    total, each = given.get("num_processes"), given.get("nproc_per_node") or given.get("num_gpus")
    nodes = given.get("nnodes") or given.get("num_nodes") or "1"
    if total and total.isascii() and total.isdecimal():
        return int(total[:6])
    if each and (each + nodes).isascii() and each.isdecimal() and nodes.isdecimal():
        return int(each[:6]) * int(nodes[:6])
    return None


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        yield name.lstrip("-").replace("-", "_"), value if equals else after
