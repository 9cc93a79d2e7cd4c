"""`megatron-vlm import CONFIG`: reads a configuration of another trainer and prints one of
this package."""

import argparse
import re
from dataclasses import replace

from megatron_vlm.commands.import_config.adapter_rules import translate_adapters
from megatron_vlm.commands.import_config.batch_rules import find_gpu_count, translate_batches
from megatron_vlm.commands.import_config.config_text import config_text
from megatron_vlm.commands.import_config.course_rules import (
    translate_intervals,
    translate_length,
    translate_optimizer,
    translate_precision,
    translate_seeds,
)
from megatron_vlm.commands.import_config.data_rules import (
    translate_data,
    translate_lengths,
    translate_media,
    translate_supervision,
)
from megatron_vlm.commands.import_config.leftovers import read_leftovers
from megatron_vlm.commands.import_config.model_rules import (
    translate_frozen_parts,
    translate_method,
    translate_model,
)
from megatron_vlm.commands.import_config.recognise_trainer import recognise_trainer
from megatron_vlm.commands.import_config.rl_rules import translate_rl
from megatron_vlm.commands.import_config.run_rules import (
    translate_folder,
    translate_layout,
    translate_recomputation,
    translate_shuffling,
)
from megatron_vlm.commands.import_config.script_settings import read_script
from megatron_vlm.commands.import_config.source_settings import (
    SourceSettings,
    read_yaml_settings,
)
from megatron_vlm.commands.import_config.translation import Translation
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.load import load_config
from megatron_vlm.config.other_trainers.trainers import TRAINER_NAMES, TrainerName
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile, home_path

_MAX_BYTES = 2**20  # maximum of a configuration or script
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_DATA_FILES = (".yaml", ".yml", ".json")
_COMMANDS = ("sft", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")
_RULES = (
    *(find_gpu_count, translate_model, translate_adapters, translate_frozen_parts, translate_data),
    *(translate_lengths, translate_media, translate_supervision, translate_batches),
    *(translate_length, translate_optimizer, translate_precision, translate_seeds),
    *(translate_intervals, translate_rl, translate_folder, translate_layout),
    *(translate_recomputation, translate_shuffling),
)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    where = "a YAML or JSON file, or a shell script with one training command"
    parser.add_argument("config", metavar="CONFIG", help=where)
    trainer = "whose configuration it is, where its keys do not tell"
    parser.add_argument("--from", dest="trainer", choices=TRAINER_NAMES, help=trainer)
    gpus = "how many GPUs it ran on, which decides the global batch of most trainers"
    parser.add_argument("--gpus", type=int, metavar="N", help=gpus)
    command = "the command of TRL that the file is for (default: sft)"
    parser.add_argument("--command", choices=_COMMANDS, help=command)
    values = "the value of a variable that the file uses; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=values)
    ignored = "leave out a key of the file that is not known here; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help=ignored)


def import_(args: argparse.Namespace) -> None:
    """print the configuration of another trainer as one of this package

    Read a configuration of LLaMA-Factory, ms-swift, TRL, axolotl or verl and print it as YAML of
    this package: each line with the setting that it came from, then what is different here and what
    has no counterpart. Nothing in the file is run, and no variable of the environment is read.

    example: megatron-vlm import qwen3vl_lora_sft.yaml --gpus 8

    The output is a file for --config of train or rl. docs/coming-from.md has tables of the keys.
    """
    if args.gpus is not None and args.gpus < 1:
        raise ConfigError(key="--gpus", found=args.gpus, allowed="at least 1")
    source = read_source(args.config, _variables(args.set))
    print(
        translated_text(source, args.trainer, args.command, args.gpus, frozenset(args.ignore)),
        end="",
    )


def read_source(path: str, variables: dict[str, str]) -> SourceSettings:
    """Read the settings of a file. Its ending says what it is."""
    file = UntrustedFile(str(home_path(path)), ConfigError)
    name = path.lower()
    if not name.endswith((*_SCRIPTS, *_DATA_FILES)):
        raise ConfigError(
            "has another ending than a configuration",
            place=path,
            remedy=f"give a file that ends in {', '.join((*_DATA_FILES, *_SCRIPTS))}",
        )
    text = file.text(_MAX_BYTES)
    if name.endswith(_SCRIPTS):
        return read_script(text, path, variables)
    return read_yaml_settings(text, path, variables)


def translated_text(
    source: SourceSettings,
    trainer: TrainerName | None = None,
    command: str | None = None,
    gpus: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> str:
    """Return our configuration for these settings. It is one that load_config takes."""
    t = Translation(source, trainer or recognise_trainer(source), gpus=gpus)
    translate_method(t, command)
    for rule in _RULES:
        rule(t)
    left = read_leftovers(t, ignored)
    text = config_text(t, left, source.file)
    _check(t, text)
    return text


def _check(t: Translation, text: str) -> None:
    """Refuse a result that this package would not take, at the line of the file that it came
    from."""
    file = ConfigFile.parse(text, t.source.file)
    lines = {key: line.line for key, line in t.lines.items() if line.line}
    load_config([], replace(file, lines=lines))


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII):
            raise ConfigError(key="--set", found=each, allowed="NAME=VALUE")
        variables[name] = value
    return variables
