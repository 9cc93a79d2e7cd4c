"""Trainers whose configurations are read, and the choice among them."""

from collections.abc import Mapping

from megatron_vlm.commands.import_config.axolotl import AXOLOTL
from megatron_vlm.commands.import_config.llamafactory import LLAMA_FACTORY
from megatron_vlm.commands.import_config.ms_swift import MEGATRON_SWIFT, MS_SWIFT
from megatron_vlm.commands.import_config.source_settings import SourceSettings
from megatron_vlm.commands.import_config.translation import Trainer
from megatron_vlm.commands.import_config.trl import TRL
from megatron_vlm.commands.import_config.verl import VERL
from megatron_vlm.errors import ConfigError

TRAINERS: Mapping[str, Trainer] = {
    "llamafactory": LLAMA_FACTORY,
    "ms-swift": MS_SWIFT,
    "trl": TRL,
    "axolotl": AXOLOTL,
    "verl": VERL,
}
_SHOWN = 5  # names of keys in the message


def trainer_of(source: SourceSettings, name: str | None) -> Trainer:
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
