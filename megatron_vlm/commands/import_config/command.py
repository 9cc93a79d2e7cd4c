"""`megatron-vlm import`: reads a configuration or a command of another trainer and prints a
configuration of this package."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_vlm.commands.import_config.axolotl import AXOLOTL
from megatron_vlm.commands.import_config.config_text import config_text, read_leftovers
from megatron_vlm.commands.import_config.llamafactory import LLAMA_FACTORY
from megatron_vlm.commands.import_config.model_rules import (
    translate_frozen_parts,
    translate_method,
    translate_model,
)
from megatron_vlm.commands.import_config.ms_swift import MEGATRON_SWIFT, MS_SWIFT
from megatron_vlm.commands.import_config.qwen_finetune import QWEN_FINETUNE
from megatron_vlm.commands.import_config.source_settings import (
    DATA_FILES,
    SourceSettings,
    read_command,
    read_settings_file,
)
from megatron_vlm.commands.import_config.translation import Trainer, Translation
from megatron_vlm.commands.import_config.trl import TRL
from megatron_vlm.commands.import_config.verl import VERL
from megatron_vlm.config.arguments import SecretiveParser, parse_arguments
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.load import load_config
from megatron_vlm.errors import ConfigError, gather_errors

TRAINERS: Mapping[str, Trainer] = {
    "llamafactory": LLAMA_FACTORY,
    "ms-swift": MS_SWIFT,
    "trl": TRL,
    "axolotl": AXOLOTL,
    "verl": VERL,
    "qwen-vl-finetune": QWEN_FINETUNE,
}
_SHOWN = 5  # names of keys in the message
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_COMMANDS = ("sft", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    where = "a YAML or JSON file, or a whole training command, as its script has it"
    _add_options(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="CONFIG | COMMAND", help=where)


def _add_options(parser: argparse.ArgumentParser) -> None:
    trainer = "whose configuration it is, where its keys do not tell"
    parser.add_argument("--from", dest="trainer", choices=[*TRAINERS], help=trainer)
    gpus = "how many GPUs it ran on, which decides the global batch of most trainers"
    parser.add_argument("--gpus", type=int, metavar="N", help=gpus)
    command = "the command of TRL that the file is for (default: sft)"
    parser.add_argument("--command", choices=_COMMANDS, help=command)
    ignored = "leave out a key that is not known here, or several with commas between them"
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help=ignored)


def import_(args: argparse.Namespace) -> None:
    """print the configuration of another trainer as one of this package

    Read a configuration of LLaMA-Factory, ms-swift, TRL, axolotl, verl or qwen-vl-finetune and
    print it as YAML of this package: each line with the setting that it came from, then what is
    different here and what has no counterpart. In a script, write megatron-vlm import in front of
    the training command and run the script: the command is read in place of being run.

    example: megatron-vlm import qwen3vl_lora_sft.yaml --gpus 8

    example: NPROC_PER_NODE=8 megatron-vlm import swift sft --model Qwen/Qwen3-VL-4B-Instruct
    --dataset chats.jsonl

    The output is a file for --config of train or rl. docs/coming-from.md has tables of the keys.
    """
    words: list[str] = args.words
    if words and words[0].lower().endswith(DATA_FILES):
        options = SecretiveParser(prog="megatron-vlm import", allow_abbrev=False)
        _add_options(options)
        options.set_defaults(**vars(args))  # options may stand behind a file
        args = parse_arguments(options, words[1:])
        words = words[:1]
    if args.gpus is not None and args.gpus < 1:
        raise ConfigError(key="--gpus", found=args.gpus, allowed="at least 1")
    source = read_source(words, os.environ)
    ignored = frozenset(",".join(args.ignore).split(","))
    print(translated_text(source, args.trainer, args.command, args.gpus, ignored), end="")


def read_source(words: Sequence[str], environment: Mapping[str, str]) -> SourceSettings:
    """Read the settings of a file, or of a command with its environment."""
    if len(words) == 1 and words[0].lower().endswith(DATA_FILES):
        return read_settings_file(words[0])
    if len(words) == 1 and words[0].lower().endswith(_SCRIPTS):
        raise ConfigError(
            "is a script, which only a shell can read",
            place=words[0],
            remedy="write `megatron-vlm import` in front of its training command, and run it",
        )
    return read_command(words, environment)


def translated_text(
    source: SourceSettings,
    trainer: str | None = None,
    task: str | None = None,
    gpus: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> str:
    """Return our configuration for these settings. It is one that load_config takes."""
    known = _trainer_of(source, trainer)
    t = Translation(source, known, gpus, task or source.task or known.task)
    errors: list[ConfigError] = []
    for rule in (translate_method, translate_model, *known.rules, translate_frozen_parts):
        try:
            rule(t)
        except ConfigError as error:
            errors += [error] if str(error) not in map(str, errors) else []
    left = read_leftovers(t, ignored, errors)
    if errors:
        raise gather_errors(errors)
    text = config_text(t, left)
    _check(t, text)
    return text


def _check(t: Translation, text: str) -> None:
    """Refuse what this package would not take, at the line of the file that it came from."""
    file = ConfigFile.parse(text, t.source.file or t.source.command)
    lines = {key: line.line for key, line in t.lines.items() if line.line}
    load_config([], replace(file, lines=lines))


def _trainer_of(source: SourceSettings, name: str | None) -> Trainer:
    """Return the trainer of a command, of --from, or else of the names in a file."""
    name = source.trainer or name or _recognised(source)
    if name == "ms-swift":
        is_megatron = not source.command and "micro_batch_size" in source.settings
        if is_megatron or source.command.startswith("megatron"):
            return MEGATRON_SWIFT
    return TRAINERS[name]


def _recognised(source: SourceSettings) -> str:
    names = {name.partition(".")[0] for name in source.settings}
    found = {
        name: sorted(names & {*trainer.own_names.split()}) for name, trainer in TRAINERS.items()
    }
    first, second = sorted(found, key=lambda name: -len(found[name]))[:2]
    if len(found[first]) > 2 * len(found[second]):
        return first
    seen = [
        f"{', '.join(found[each][:_SHOWN])} of {each}" for each in (first, second) if found[each]
    ]
    raise ConfigError(
        f"has the keys {' and '.join(seen)}" if seen else "has no key by which a trainer is known",
        place=source.file,
        remedy=f"say whose it is: --from {'|'.join(TRAINERS)}",
    )
