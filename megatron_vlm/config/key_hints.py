"""Answers to unknown keys: the names of other trainers for this one's keys, and near misses. A
wrong guess is worse than none, so only a close match is suggested."""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import is_dataclass

from megatron_vlm.config.group_values import group_names, setting_of
from megatron_vlm.config.other_trainers import NAME_FAMILIES, OTHER_SENTENCES, SAME_KEYS, SECTIONS
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import NOT_GIVEN, ConfigError, show_value

_MAX_PARTS = 16  # more than any name has
_ANSWERS = {key.replace(".", "_"): key for key in leaves()} | OTHER_SENTENCES
_ANSWERS |= {name: key for key, names in SAME_KEYS.items() for name in names.split()}


def unknown_key_error(key: str) -> ConfigError:
    """Return the error on a key that does not exist, with what to write instead."""
    return ConfigError("is not a configuration key", key=show_value(key), remedy=hint(key))


def hint(wrong: str) -> str:
    """Return the remedy for "WRONG is not a configuration key"."""
    if keys := similar_keys(wrong):
        return f"did you mean {' or '.join(map(repr, keys))}?"
    if text := hint_sentence(wrong):
        return text
    group, _, name = wrong.partition(".")
    groups = group_names()
    group = name if name in groups else group
    if name and group in groups:
        return f"the keys of {group} are {', '.join(_names_of(group))}"
    return f"the groups of keys are {', '.join(groups)}: see megatron-vlm train --help"


def is_of_other_trainer(name: str) -> bool:
    """Return whether another trainer has this name, and there is an answer to it."""
    return counterpart_of(name) is not None


def counterpart_of(name: str) -> str | None:
    """Return our key for a name that another trainer has, or the sentence on what is here instead.
    Nothing is guessed."""
    return _known_elsewhere(_plain(name))


def similar_keys(wrong: str) -> Sequence[str]:
    """Return the keys that were most likely meant, or an empty sequence if nothing is near."""
    wrong = _plain(wrong)
    if wrong in leaves():
        return [wrong]
    if known := _known_elsewhere(wrong):
        return [known] if known in leaves() else []
    group, _, last = wrong.rpartition(".")
    if group and last in group_names():
        return []
    if same_name := [key for key in leaves() if "." in key and key.rpartition(".")[2] == last]:
        near_keys = [key for key in same_name if _are_near(group, key.rpartition(".")[0])]
        return near_keys or same_name
    if _section_sentence(wrong, OTHER_SENTENCES):
        return []
    # A word that is a little like the name of a group is seldom that group.
    if near_keys := difflib.get_close_matches(last, _names_of(group), 1, 0.6 if group else 0.8):
        return [f"{group}.{near_keys[0]}" if group else near_keys[0]]
    all_keys = [] if _names_of(group) and group else list(key_types())
    return difflib.get_close_matches(wrong, all_keys, n=1, cutoff=0.8)


def _are_near(group: str, other: str) -> bool:
    return bool(difflib.get_close_matches(group, [other], n=1, cutoff=0.6))


def hint_sentence(wrong: str) -> str | None:
    """Return a sentence on a key of other trainers, or None."""
    wrong = _plain(wrong)
    if known := _known_elsewhere(wrong):
        return None if known in leaves() else known
    return _section_sentence(wrong, OTHER_SENTENCES)


def names_elsewhere(key: str) -> list[str]:
    """Return the names that other trainers have for a key, with values that mean the same."""
    return SAME_KEYS.get(key, "").split()


def related_names(key: str) -> list[str]:
    """Return the keys of other trainers that a sentence about this key answers."""
    begins = re.compile(rf"{re.escape(key)}(?![\w.]*\w)")
    return [name for name, text in OTHER_SENTENCES.items() if begins.match(text)]


def option_error(option: str, value: str | None) -> ConfigError:
    """Return an error on an unknown option, such as `--lr 1e-5`, with what to write instead."""
    option, _, joined = option.partition("=")
    name, value = option.lstrip("-"), joined or value
    remedy, problem = hint(name), ": settings are given as KEY=VALUE"
    if is_dataclass(key_types().get(name)):
        remedy = f"{name}=NAME chooses a recipe, {name}.KEY=VALUE sets a value"
        if value is not None:
            remedy = f"write {setting_of(name, value)}"
    elif len(keys := similar_keys(name)) == 1:
        remedy = f"write {keys[0]}={value or 'VALUE'}"
    elif not keys and not hint_sentence(name):
        problem = "is not an option"
    shown_value = NOT_GIVEN if value is None else value
    return ConfigError(problem, key=option, found=shown_value, remedy=remedy)


def _known_elsewhere(wrong: str) -> str | None:
    if text := _section_sentence(wrong, SECTIONS):
        return text
    for name in _spellings(wrong):
        if "." in name and name in leaves():
            return name
        if found := _ANSWERS.get(name):
            return found
    last = wrong.rpartition(".")[2]
    return next((text for start, text in NAME_FAMILIES.items() if last.startswith(start)), None)


def _section_sentence(wrong: str, sections: Collection[str]) -> str | None:
    """Return the sentence on one of these sections that has the key: critic.optim.lr is below
    critic."""
    parts = [part for part in wrong.split(".")[:-1] if part in sections]
    return OTHER_SENTENCES[parts[0]] if parts else None


def _plain(wrong: str) -> str:
    """Return a name in the form of the tables: --freeze-ViT and FREEZE_VIT are freeze_vit."""
    return wrong.replace("-", "_").lower()


def _spellings(wrong: str) -> list[str]:
    """Return a dotted name as other trainers may write it, from the whole to its last part:
    lora.rank is lora_rank, actor.optim.lr is optim.lr."""
    parts = wrong.split(".")[-_MAX_PARTS:]
    ends = [parts[start:] for start in range(len(parts))]
    return [mark.join(end) for end in ends for mark in (".", "_")]


def _names_of(group: str) -> list[str]:
    """Return the names of the keys of a group; with "", of the keys outside the groups."""
    return [
        key.rpartition(".")[2]
        for key, kind in key_types().items()
        if key.rpartition(".")[0] == group and not (group and is_dataclass(kind))
    ]
