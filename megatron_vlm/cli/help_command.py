"""`megatron-vlm help TOPIC`, and the same after --help."""

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from megatron_vlm.errors import ConfigError, show_value
from megatron_vlm.io.printable import escape_controls

Commands = Mapping[str, argparse.ArgumentParser]


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the topic."""
    about = "a command, a key (optim.lr), a group (optim), a recipe (lora=all), or a word"
    parser.add_argument("topic", nargs="*", metavar="TOPIC", help=about)


def help_(args: argparse.Namespace) -> None:
    """explain a command, a key or a group of keys

    Show the --help of a command, or the meaning, type, default and range of a configuration key,
    with the recipes that set it and the names that other trainers have for it. A word lists the
    keys whose name or meaning has it.

    example: megatron-vlm help optim.lr
    """
    explain_command_or_key(args.root, args.commands, " ".join(args.topic))


def explain_command_or_key(root: argparse.ArgumentParser, commands: Commands, topic: str) -> None:
    """Print the help of a command, or the explanation of a key. Some groups have the name of a
    command; a dot after it, as in `train.`, means the group."""
    if not topic:
        root.print_help()
    elif topic in commands:
        from megatron_vlm.config.group_values import group_names

        commands[topic].print_help()
        if topic in group_names():
            print(f"\nThe keys of the group {topic} are explained by megatron-vlm help {topic}.")
    else:
        explain_key(topic, commands)


def explain_key(topic: str, commands: Commands) -> None:
    """Print the explanation of a key or group; raise ConfigError if there is none."""
    from megatron_vlm.config.key_help import explain_topic
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
