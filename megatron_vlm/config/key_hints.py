"""Answers to unknown keys: the names of other trainers for this one's keys, and near misses. A
wrong guess is worse than none, so only a close match is suggested. There are also remedies for a
value of a group that is no recipe, such as `model=ORG/NAME` or `optim=adamw_torch`."""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import is_dataclass
from pathlib import Path

from megatron_vlm.config.other_trainers import NAME_FAMILIES, OTHER_SENTENCES, SAME_KEYS, SECTIONS
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import NOT_GIVEN, ConfigError, show_value
from megatron_vlm.io.hub import hub_name

_DATA_FILE = re.compile(r"\.(jsonl?|parquet|arrow|tar|csv)(\.gz)?$")
_FALSE = ("false", "no", "none", "null", "off", "0")
_TRUE = ("true", "yes", "on", "1")
# Keys that take a path, for a group that was given one.
_PATH_KEYS = {
    "model": "model.path",
    "data": "data.train",
    "train": "data.train",
    "eval": "data.eval",
    "lora": "lora.path",
    "checkpoint": "checkpoint.resume",
}
_ADAMW = (
    "AdamW is what runs unless optim.name=muon is given: leave it out, and set optim.lr, "
    "optim.beta1, optim.beta2, optim.eps and optim.weight_decay; optim.states=int8 keeps moments "
    "in 8 bits"
)
_PREFERENCES = (
    "preferences are an objective of megatron-vlm train, such as train.objective=dpo, and "
    "megatron-vlm rl learns from rewards, with a recipe such as rl=grpo"
)
_NO_CRITIC = (
    "no critic is trained: rl=grpo and rl=rloo compare the answers to one prompt, and rl.loss=ppo "
    "clips the ratio as PPO does"
)
_OBJECTIVES = ("sft", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "reward", "embed", "rerank")
# Values of other trainers, by group.
_VALUES = {
    "train": {name: f"did you mean train.objective={name}?" for name in _OBJECTIVES},
    "preference": {name: f"did you mean train.objective={name}?" for name in _OBJECTIVES},
    "rl": {
        **dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), _PREFERENCES),
        **dict.fromkeys(("ppo", "gae", "reinforce", "reinforce_plus_plus"), _NO_CRITIC),
    },
    "lora": {
        **dict.fromkeys(("lora", *_TRUE), "did you mean lora=default?"),
        **dict.fromkeys(("full", *_FALSE), "did you mean lora=none?"),
    },
    "optim": {
        name: f"did you mean optim.schedule={name}?"
        for name in ("constant", "linear", "cosine", "wsd")
    },
    "log": dict.fromkeys(
        ("none", "false", "null"), "leave it out: metrics.jsonl and the report are written anyway"
    ),
    "eval": dict.fromkeys(
        _FALSE, "leave data.eval out, and nothing is evaluated; eval.every=0 does it at the end"
    ),
}


def config_dir() -> Path:
    """Return the folder of YAML files: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def group_names() -> list[str]:
    """Return the groups of keys."""
    return [key for key, kind in key_types().items() if is_dataclass(kind)]


def recipes_of(group: str) -> list[str]:
    """Return the names of the recipes of a group."""
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


def recipe_error(group: str, value: str) -> ConfigError:
    """Return the error on a value of a group that is no recipe, with what was meant."""
    remedy = meant_by_value(group, value) or f"choose one of {', '.join(recipes_of(group))}"
    return ConfigError("is not a recipe", key=group, found=value, remedy=remedy)


def meant_by_value(group: str, value: str) -> str | None:
    """Return what to write instead of GROUP=VALUE, or None if nothing is near."""
    plain = value.lower().replace("-", "_")
    if text := _VALUES.get(group, {}).get(plain):
        return text
    names = recipes_of(group)
    if _is_path(value) and group in _PATH_KEYS:
        return f"did you mean {_with_recipe(group, value, names)}?"
    if group == "model" and (recipe := _recipe_in(value, names)):
        is_recipe = plain.replace(".", "_") == recipe
        meant = f"model={recipe}" if is_recipe else _with_recipe(group, value, names)
        return f"did you mean {meant}?"
    if any(key.startswith(f"{group}.") and key.endswith(f".{plain}") for key in key_types()):
        return f"did you mean {group}.{plain}=VALUE?"
    if near := difflib.get_close_matches(plain, names, n=1, cutoff=0.75):
        return f"did you mean {group}={near[0]}?"
    return _ADAMW if group == "optim" else None


def setting_of(group: str, value: str) -> str:
    """Return GROUP=VALUE for a recipe, and the key of a path for anything else."""
    names = recipes_of(group)
    if value in names or group not in _PATH_KEYS:
        return f"{group}={value}"
    return _with_recipe(group, value, names)


def setting_of_word(word: str, data: str) -> str | None:
    """Return the setting that was meant by a word alone: a recipe, a model or, for the key `data`,
    a data set. Return None for any other word."""
    for group in _PATH_KEYS:
        if word != "default" and word in recipes_of(group):
            return f"{group}={word}"
    if _DATA_FILE.search(word):
        return f"data.{data}={word}"
    if (Path(word) / "config.json").is_file() or hub_name(word) is not None:
        return setting_of("model", word)
    return f"data.{data}={word}" if Path(word).is_dir() else None


def _is_path(value: str) -> bool:
    is_there = bool(value) and Path(value).exists()
    return "/" in value or value.startswith("~") or bool(_DATA_FILE.search(value)) or is_there


def _with_recipe(group: str, value: str, names: list[str]) -> str:
    """Return the setting of a path, after the recipe of its model if the name tells it."""
    recipe = _recipe_in(value, names) if group == "model" else None
    setting = f"{_PATH_KEYS[group]}={value}"
    return f"model={recipe} {setting}" if recipe else setting


def _recipe_in(path: str, names: list[str]) -> str | None:
    """Return the recipe of a model by its name: Qwen/Qwen3-VL-2B-Instruct has qwen3_vl_2b."""
    plain = re.sub(r"[-.]", "_", path.lower())
    models = [name for name in names if name != "default"]
    found = [name for name in models if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", plain)]
    return max(found, key=len, default=None)


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
        groups = {key.rpartition(".")[0] for key in same_name}
        near = difflib.get_close_matches(group, groups, len(groups))
        return [key for key in same_name if key.rpartition(".")[0] in near] or same_name
    if _section_sentence(wrong, OTHER_SENTENCES):
        return []
    # A word that is a little like the name of a group is seldom that group.
    if near_keys := difflib.get_close_matches(last, _names_of(group), 1, 0.6 if group else 0.8):
        return [f"{group}.{near_keys[0]}" if group else near_keys[0]]
    all_keys = [] if _names_of(group) and group else list(key_types())
    return difflib.get_close_matches(wrong, all_keys, n=1, cutoff=0.8)


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
    # From the whole to its last part: lora.rank is lora_rank, actor.optim.lr is optim.lr.
    parts = wrong.split(".")[-_MAX_PARTS:]
    ends = [parts[start:] for start in range(len(parts))]
    for name in [mark.join(end) for end in ends for mark in (".", "_")]:
        if "." in name and name in leaves():
            return name
        if found := _ANSWERS.get(name):
            return found
    last = wrong.rpartition(".")[2]
    return next((text for start, text in NAME_FAMILIES.items() if last.startswith(start)), None)


def _section_sentence(wrong: str, sections: Collection[str]) -> str | None:
    """Return the sentence on a section above the key: critic.optim.lr is below critic."""
    parts = [part for part in wrong.split(".")[:-1] if part in sections]
    return OTHER_SENTENCES[parts[0]] if parts else None


def _plain(wrong: str) -> str:
    """Return a name in the form of the tables: --freeze-ViT and FREEZE_VIT are freeze_vit."""
    return wrong.replace("-", "_").lower()


def _names_of(group: str) -> list[str]:
    """Return the names of the keys of a group; with "", of the keys outside the groups."""
    return [
        key.rpartition(".")[2]
        for key, kind in key_types().items()
        if key.rpartition(".")[0] == group and not (group and is_dataclass(kind))
    ]
