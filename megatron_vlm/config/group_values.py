"""Remedies for a value of a group that is no recipe, such as `model=ORG/NAME` or
`optim=adamw_torch`."""

import difflib
import re
from dataclasses import is_dataclass
from pathlib import Path

from megatron_vlm.config.schema import key_types
from megatron_vlm.errors import ConfigError
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
_OBJECTIVES = ("sft", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "embed", "rerank")
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
