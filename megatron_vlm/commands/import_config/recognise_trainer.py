"""The trainer whose configuration a file is, by the names of its keys."""

from megatron_vlm.commands.import_config.source_settings import SourceSettings
from megatron_vlm.config.other_trainers.trainers import OTHER_TRAINERS, TrainerName
from megatron_vlm.errors import ConfigError

_OF_COMMAND: dict[str, TrainerName] = {
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "trl": "trl",
    "verl": "verl",
}
_SHOWN = 5  # names of keys in the message


def recognise_trainer(source: SourceSettings) -> TrainerName:
    """Return the trainer that has the names of this file. The file of --from needs no such
    search."""
    if source.command:
        return _OF_COMMAND[source.command.split()[0]]
    names = {name.partition(".")[0] for name in source.settings}
    found: dict[TrainerName, list[str]] = {
        trainer: sorted(names & {*other.own_names.split()})
        for trainer, other in OTHER_TRAINERS.items()
    }
    first, second = sorted(found, key=lambda trainer: -len(found[trainer]))[:2]
    if len(found[first]) > 2 * len(found[second]):
        return first
    seen = [
        f"{', '.join(found[each][:_SHOWN])} of {each}" for each in (first, second) if found[each]
    ]
    raise ConfigError(
        f"has the keys {' and '.join(seen)}" if seen else "has no key by which a trainer is known",
        place=source.file,
        remedy=f"say whose it is: --from {'|'.join(OTHER_TRAINERS)}",
    )
