"""Settings of another trainer's command. The shell has split its words already, and replaced
variables, globs and `$(...)` in them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_vlm.commands.import_config.source_settings import (
    DATA_FILES,
    Setting,
    SourceSettings,
    read_settings_file,
)
from megatron_vlm.config.yaml_nodes import YamlText
from megatron_vlm.errors import ConfigError, show_value

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
}
_ONE_VALUE = ("axolotl", "verl")  # an option has one value at most; others take lists
_MAX_WORDS = 4000
_REMEDY = (
    "give a YAML or JSON file, or write `megatron-vlm import` in front of llamafactory-cli train, "
    "swift sft, megatron sft, trl sft, axolotl train or python -m verl.trainer.main_ppo, with its "
    "launcher and its arguments"
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
