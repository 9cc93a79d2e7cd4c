"""Keys that went or moved. A typed one is answered with the new name, and a config.yaml that was
saved with it is read as before."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vlm.config.evaluation_checks import epochs_text
from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class MovedKey:
    answer: str  # the remedy for a user who types the old key
    values: Callable[[Any], dict[str, Any]]  # today's keys and values for a saved value


def _renamed(key: str, default: Any = None) -> MovedKey:
    """Return a key with a new name. A saved value that is the default of both names changes
    nothing, so that two old keys may have become one."""
    return MovedKey(f"write {key}", lambda value: {} if value == default else {key: value})


def _removed(answer: str) -> MovedKey:
    """Return a key whose only useful value is what happens now."""
    return MovedKey(answer, lambda value: {})


def _gone(key: str, only: Any, answer: str) -> MovedKey:
    """Return a key whose feature is gone. A run with another value than `only` cannot go on."""

    def values(value: Any) -> dict[str, Any]:
        if value != only:
            remedy = "finish the run with the version that began it"
            raise ConfigError("is not supported any more", key=key, found=value, remedy=remedy)
        return {}

    return MovedKey(answer, values)


def _part(mapping: str, name: str, default: Any = None) -> MovedKey:
    """Return a key that is now an entry of a mapping, where its default need not stand."""
    return MovedKey(
        f"write '{mapping}={{{name}: VALUE}}'",
        lambda value: {} if value == default else {mapping: {name: value}},
    )


def _epochs(key: str) -> MovedKey:
    """Return a number of epochs that this key has now."""
    return MovedKey(
        f'write {key}="N epochs"', lambda value: {} if value is None else {key: epochs_text(value)}
    )


_LOADED = {"adapters": 8, "full_models": 1, "snapshots": 8, "full_snapshots": 1}
_DECAY = "leave it out: optim.weight_decay is that of all parts"
_PARALLELISM = "leave it out, for the reason that docs/parallelism.md gives"
# Keys of engines, which `rl` and `serve` both had: the new name, and the default.
_ENGINE_KEYS = {
    "sampler": ("name", "own"),
    "sampler_rows": ("rows", 64),
    "engine": ("python", None),
    "engine_gpus": ("devices", []),
    "engine_max_len": ("max_len", None),
    "engine_pictures": ("pictures", None),
    "engine_videos": ("videos", 0),
    "engine_options": ("options", {}),
}
_TEACHER_KEYS: dict[str, tuple[str, Any]] = {
    "data.teacher": ("teacher.path", None),
    "data.teacher_top_k": ("teacher.top_k", None),
    "rl.teacher": ("teacher.path", None),
    "rl.teacher_scorer": ("teacher.engine", "own"),
    "rl.teacher_coef": ("teacher.coef", 1.0),
    "rl.teacher_top_k": ("teacher.top_k", 0),
    "rl.teacher_gpus": ("teacher.devices", []),
    "rl.teacher_options": ("teacher.options", {}),
}
MOVED_KEYS: dict[str, MovedKey] = {
    "parallel.cp": _removed(f"{_PARALLELISM}; parallel.tp and model.recompute save memory"),
    "parallel.sequence_parallel": _removed(f"{_PARALLELISM}; model.recompute saves memory"),
    "train.packing": _removed(f"{_PARALLELISM}; train.micro_batch_tokens fills micro-batches"),
    "lora.init": _removed("leave it out: A begins by kaiming_uniform, as in PEFT"),
    "log.profile_ranks": _removed("leave it out: rank 0 writes the trace of log.profile_steps"),
    "data.on_error": MovedKey(
        "write data.max_errors: 100 leaves up to 100 invalid records out, 0 stops at the first",
        lambda value: {"data.max_errors": 0} if value == "raise" else {},
    ),
    "eval.every_epochs": _epochs("eval.every"),
    "checkpoint.every_epochs": _epochs("checkpoint.every"),
    **{
        f"data.video_{name}": _part("data.video", name)
        for name in ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")
    },
    **{
        f"optim.muon_{name}": _part("optim.muon", name)
        for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
    },
    "optim.vision_weight_decay": _gone("optim.vision_weight_decay", None, _DECAY),
    "optim.merger_weight_decay": _gone("optim.merger_weight_decay", None, _DECAY),
    # The last one counts: a folder of scores was read before train.reference.
    "train.reference": _renamed("preference.reference", "auto"),
    "data.reference": _renamed("preference.reference"),
    **{old: _renamed(new, default) for old, (new, default) in _TEACHER_KEYS.items()},
    "rl.teacher_timeout": _removed("leave it out: an engine has ten minutes for a row"),
    **{f"serve.{name}": _part("serve.loaded", name, default) for name, default in _LOADED.items()},
    **{
        f"{group}.{old}": _renamed(f"engine.{new}", default)
        for group in ("rl", "serve")
        for old, (new, default) in _ENGINE_KEYS.items()
    },
}


# Digests of files that checkpoints have under the names of keys.
_NAMES_OF_DIGESTS = {
    "data.teacher": "teacher.path",
    "data.reference": "preference.reference",
    "rl.teacher": "teacher.path",
}


def todays_name(name: str) -> str:
    """Return the name that the digest of a checkpoint has today: that of a key, of a part of its
    value, or of its content."""
    for old, new in _NAMES_OF_DIGESTS.items():
        if name in (old, f"content of {old}") or name.startswith(f"{old}."):
            return name.replace(old, new)
    return name


def with_todays_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved configuration, by group, under the keys that they have today."""
    groups = {name: dict(part) if isinstance(part, dict) else part for name, part in saved.items()}
    moved: dict[str, Any] = {}
    for old, new in MOVED_KEYS.items():
        group, _, name = old.partition(".")
        if isinstance(groups.get(group), dict) and name in groups[group]:
            for key, value in new.values(groups[group].pop(name)).items():
                is_part = isinstance(value, dict)  # several old keys may be parts of one mapping
                moved[key] = {**moved.get(key, {}), **value} if is_part else value
    for key, value in moved.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups
