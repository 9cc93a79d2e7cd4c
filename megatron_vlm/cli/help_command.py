"""`megatron-vlm help TOPIC`, and the same after --help. Words stay whole, and an example can be
pasted into a shell."""

import argparse
import difflib
import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from megatron_vlm.errors import ConfigError, show_value
from megatron_vlm.io.printable import escape_controls, wrap_words

_EXAMPLE = "example: "
_EXAMPLE_WIDTH = 76


def texts_of(run: Callable[..., Any]) -> dict[str, str | None]:
    """Return the texts of a command from the docstring of its function: the first paragraph is its
    line in the list of commands, the second the description, and the rest stands below the
    options. A paragraph `example: COMMAND` has nothing but a command."""
    line, description, *rest = inspect.cleandoc(run.__doc__ or "\n\n").split("\n\n")
    epilog = "\n\n".join(map(_shown, rest)) or None
    return {"help": line, "description": description, "epilog": epilog}


def _shown(paragraph: str) -> str:
    text = " ".join(paragraph.split())
    if not text.startswith(_EXAMPLE):
        return text
    lines = ["  "]
    for word in shlex.split(text.removeprefix(_EXAMPLE), posix=False):  # quotes stay
        if len(lines[-1]) + len(word) > _EXAMPLE_WIDTH:
            lines[-1] += "\\"
            lines.append("      ")
        lines[-1] += f"{word} "
    return "\n".join(["example:", *(line.rstrip() for line in lines)])


class HelpText(argparse.HelpFormatter):
    """Formatter that never breaks a word, leaves lines with two leading spaces as they are, and
    marks required options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            has_layout = "\n  " in paragraph
            paragraphs.append(paragraph if has_layout else "\n".join(_wrap(paragraph, width)))
        return "\n\n".join(paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        return f"{text} (required)" if action.option_strings and action.required else text


class HelpWithDefaults(HelpText):
    """The same, with the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        has_default = not any(action.default is no for no in (None, False, argparse.SUPPRESS))
        return f"{text} (default: %(default)s)" if has_default else text


def _wrap(text: str, width: int) -> list[str]:
    return wrap_words(" ".join(text.split()), width)


Commands = Mapping[str, argparse.ArgumentParser]


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the topic."""
    about = "a command, a key (optim.lr), a group (optim), a recipe (lora=all), a word, or schema"
    parser.add_argument("topic", nargs="*", metavar="TOPIC", help=about)


def help_(args: argparse.Namespace) -> None:
    """explain a command, a key or a group of keys

    Show the --help of a command, or the meaning, type, default and range of a configuration key,
    with the recipes that set it and the names that other trainers have for it. A word lists the
    keys whose name or meaning has it. `schema` prints the JSON schema of --config files.

    example: megatron-vlm help optim.lr
    """
    explain_command_or_key(args.root, args.commands, " ".join(args.topic))


def explain_command_or_key(root: argparse.ArgumentParser, commands: Commands, topic: str) -> None:
    """Print the help of a command, or the explanation of a key. Some groups have the name of a
    command; a dot after it, as in `train.`, means the group."""
    if not topic:
        root.print_help()
    elif topic == "schema":
        from megatron_vlm.config.json_schema import config_schema

        print(json.dumps(config_schema(), indent=1))
    elif topic in commands:
        from megatron_vlm.config.key_hints import group_names

        commands[topic].print_help()
        if topic in group_names():
            print(f"\nThe keys of the group {topic} are explained by megatron-vlm help {topic}.")
    else:
        explain_key(topic, commands)


def explain_key(topic: str, commands: Commands) -> None:
    """Print the explanation of a key or group; raise ConfigError if there is none."""
    from megatron_vlm.config.key_docs import explain_topic
    from megatron_vlm.config.key_hints import hint

    text = explain_topic(topic)
    if text is None:
        near = difflib.get_close_matches(topic, commands, n=1, cutoff=0.7)
        raise ConfigError(
            f": {show_value(topic)} is neither a command nor a key",
            place="help",
            remedy=f"did you mean {near[0]}?" if near else hint(topic),
        )
    print(escape_controls(text))


class TopicHelp(argparse.Action):
    """Option --help that takes a key or group to explain. `root` is None for a command, where the
    name of a group means its keys."""

    def __init__(
        self, *args: Any, root: argparse.ArgumentParser | None, commands: Commands, **more: Any
    ):
        super().__init__(*args, **more)
        self.root, self.commands = root, commands

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is None or "=" in values:  # KEY=VALUE is the rest of a command line
            parser.print_help()
        elif self.root is None:
            explain_key(values, {})
        else:
            explain_command_or_key(self.root, self.commands, values)
        parser.exit()
