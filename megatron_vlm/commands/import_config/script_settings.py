"""Settings of the command in a shell script that starts another trainer."""

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_vlm.commands.import_config.shell_words import ShellCommand, ShellReader, ShellWord
from megatron_vlm.commands.import_config.source_settings import Setting, SourceSettings
from megatron_vlm.config.yaml_nodes import YamlText
from megatron_vlm.errors import ConfigError, show_value

_SWIFT = ("swift", "megatron")
_SWIFT_TASKS = ("sft", "pt", "rlhf")
_TRL_TASKS = ("sft", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward")
_TRL_SCRIPT = re.compile(rf"(?:.*/)?(?:{'|'.join(_TRL_TASKS)})(?:_\w+)?\.py")
_VERL = re.compile(r"verl\.trainer\.main(?:_\w+)?|(?:.*/)?main_ppo\.py")
_FILE_COMMANDS = ("llamafactory-cli", "axolotl", "llamafactory.cli", "axolotl.cli.train")
_REDIRECTION = re.compile(r"\d*[<>]")
_LOST = re.compile(r"\+{0,2}[\w.]+\.[\w.]+=|--\w")  # arguments that no command gets


def read_script(text: str, file: str, variables: Mapping[str, str]) -> SourceSettings:
    """Return the settings of the one training command in a script."""
    reader = ShellReader(text, file, variables)
    found: list[tuple[str, int, ShellCommand]] = []
    for command in reader.commands():
        name, first = _trainer_command(command, file)
        if name:
            command.variables = reader.exported | command.variables
            found.append((name, first, command))
    if len(found) != 1:
        lines = " and ".join(str(command.words[0].line) for _, _, command in found)
        raise ConfigError(
            f"has training commands in lines {lines}" if found else "has no training command",
            place=file,
            remedy="give a script with one: swift sft or rlhf, megatron sft, trl sft, or "
            "python -m verl.trainer.main_ppo",
        )
    name, first, command = found[0]
    words = command.words[first:]
    if name == "verl":
        settings = {each.name: each for each in _overrides(words, file)}
    else:
        settings = {each.name: each for each in _options(words, file)}
    given = {
        key: Setting(key, word.text, word.line, word.unknown)
        for key, word in command.variables.items()
    }
    return SourceSettings(file, settings, name, given)


def _trainer_command(command: ShellCommand, file: str) -> tuple[str, int]:
    """Return the name of a training command, and the place of its first argument; "" and 0 for
    another command."""
    words = [word.text for word in command.words]
    if words and _LOST.match(words[0]):
        raise ConfigError(
            f": {show_value(words[0])} belongs to no command, as in the shell: the line before "
            "ends the command, by a comment or without a backslash",
            place=f"{file}, line {command.words[0].line}",
            remedy="join the lines",
        )
    for place, word in enumerate(words):
        after = words[place + 1 : place + 2]
        last = word.rpartition("/")[2]
        if last in _SWIFT and after and after[0] in _SWIFT_TASKS:
            return f"{last} {after[0]}", place + 2
        if last == "trl" and after and after[0] in _TRL_TASKS:
            return f"trl {after[0]}", place + 2
        if _TRL_SCRIPT.fullmatch(word):
            return f"trl {re.split(r'[_.]', last)[0]}", place + 1
        if _VERL.fullmatch(word):
            return "verl", place + 1
        if last in _FILE_COMMANDS:
            raise ConfigError(
                f"starts {last}, whose settings are in a file of their own",
                place=f"{file}, line {command.words[place].line}",
                remedy="give that YAML file in place of the script",
            )
    return "", 0


def _options(words: Sequence[ShellWord], file: str) -> Iterator[Setting]:
    """Yield the settings of --NAME VALUE and --NAME=VALUE. An option without a value is true, and
    one with several has a list."""
    place = 0
    while place < len(words) and not _REDIRECTION.match(words[place].text):
        word = words[place]
        if not word.text.startswith("--"):
            if word.text:
                raise ConfigError(
                    f": {show_value(word.text)} is not an option",
                    place=f"{file}, line {word.line}",
                    remedy="write it as --NAME VALUE",
                )
            place += 1
            continue
        name, equals, joined = word.text.removeprefix("--").partition("=")
        values = [ShellWord(joined, word.line, word.unknown)] if equals else []
        place += 1
        while not equals and place < len(words) and _is_value(words[place].text):
            values.append(words[place])
            place += 1
        texts: list[str] = [each.text for each in values]
        if len(texts) > 1:
            texts = [text.strip(",") for text in texts]
        unknown = next((each.unknown for each in values if each.unknown), "")
        value = True if not texts else texts[0] if len(texts) == 1 else texts
        yield Setting(name.replace("-", "_"), value, word.line, unknown)


def _is_value(text: str) -> bool:
    is_number = re.match(r"-[\d.]", text) is not None
    return not _REDIRECTION.match(text) and (is_number or not text.startswith("--"))


def _overrides(words: Sequence[ShellWord], file: str) -> Iterator[Setting]:
    """Yield the settings of Hydra's KEY=VALUE, +KEY=VALUE and ~KEY."""
    for word in words:
        if _REDIRECTION.match(word.text):
            return
        key, equals, text = word.text.lstrip("+").partition("=")
        if not word.text or word.text.startswith(("--config", "~")):
            continue
        if not equals:
            raise ConfigError(
                f": {show_value(word.text)} is not KEY=VALUE",
                place=f"{file}, line {word.line}",
                remedy="write the value, or remove it",
            )
        yield Setting(key, _plain_value(text, file, word.line), word.line, word.unknown)


def _plain_value(text: str, file: str, line: int) -> object:
    """Return the value of an override. Text that is no YAML stays as it is."""
    try:
        document = YamlText(f"{file}, line {line}", keeps_variables=True)
        node = document.root(text)
        return None if node is None else document.value(node)
    except ConfigError:
        return text
