"""Arguments after a command: options, --config and KEY=VALUE in any order."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Literal

from megatron_vlm.config.config_file import ConfigFile, add_config_option, chosen_file
from megatron_vlm.config.group_values import setting_of_word
from megatron_vlm.config.key_hints import option_error
from megatron_vlm.errors import ConfigError, hide_secrets, show_value


def add_overrides(
    parser: argparse.ArgumentParser, text: str = "see megatron-vlm train --help"
) -> None:
    """Add KEY=VALUE and --config to a command that takes a configuration."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)
    add_config_option(parser)


def add_cfg_option(parser: argparse.ArgumentParser) -> None:
    """Add --cfg job, as Hydra's programs have it."""
    resolved = "print the resolved configuration as YAML and stop"
    parser.add_argument("--cfg", choices=["job"], help=resolved)


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command. Overrides may come before, between and after the options.
    An unknown option is refused with what to write instead."""
    args, rest = parser.parse_known_args(words)
    if rest and not hasattr(args, "overrides"):
        shown = ascii(hide_secrets(" ".join(rest)))[1:-1]
        parser.error(f"unrecognized arguments: {shown}")
    for word in rest:
        if re.match(r"--?\w", word):
            raise _option_error(word, words)
    if hasattr(args, "overrides"):
        args.overrides += rest
        _check_words(args.overrides, "eval" if words[:1] == ["eval"] else "train")
    return args


def _check_words(overrides: Sequence[str], data: Literal["train", "eval"]) -> None:
    """Refuse words alone, such as `train base chats.jsonl`, with the settings that they mean."""
    alone = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if not alone:
        return
    meant = [
        f"--config {word}" if word.endswith((".yaml", ".yml")) else setting_of_word(word, data)
        for word in alone
    ]
    raise ConfigError(
        ": arguments are given as KEY=VALUE",
        key=" ".join(map(show_value, alone)),
        remedy=f"write {' '.join(filter(None, meant))}" if any(meant) else "",
    )


def read_configuration(args: argparse.Namespace) -> tuple[ConfigFile | None, list[str]]:
    """Return the file of --config, and the arguments that give other processes the same
    configuration."""
    file = chosen_file(args)
    return file, [*(file.words if file else []), *args.overrides]


def _option_error(option: str, words: Sequence[str]) -> ConfigError:
    known = ["--config", "--dry-run", "--cfg", "--debug", "--html", "--predictions"]
    known += ["--gpus", "--memory", "--efficiency", "--engine", "--bound"]
    name = option.partition("=")[0].replace("_", "-")
    if name in known:  # Another command has it.
        return ConfigError(
            f"is not an option of {words[0]}",
            key=option,
            remedy=f"megatron-vlm {words[0]} --help lists its options",
        )
    completions = [each for each in known if len(name) > 3 and each.startswith(name)]
    if near := completions or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return ConfigError("is not an option", key=option, remedy=f"did you mean {near[0]}?")
    after = words[list(words).index(option) + 1 :][:1]
    value = after[0] if after and re.match(r"[^-+~]|-[0-9.]", after[0]) else None
    return option_error(option, None if value and "=" in value else value)
