"""Differences between the configuration of a run and its earlier configuration."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.config import read_saved
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.data_sources import WITHOUT_EFFECT, plain_sets, plain_sources
from megatron_vlm.config.load import given_keys
from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import hub_name

_LONGEST = 200  # characters of a value
_PLAIN: dict[str, Callable[[Any], Any]] = {"data.train": plain_sources, "data.eval": plain_sets}
# Keys that make a run another experiment, since they change what it learns from, and how. A run may
# continue for longer.
_LEARNING = (
    *("model.path", "model.freeze", "model.router", "lora.", "data.", "optim.", "train."),
    *("preference.", "distill.", "embed.", "rerank."),
)
_LEARNING_RL = (
    "rl.reward",
    "rl.environment",
    "rl.samples",
    "rl.loss",
    "rl.advantage",
    "rl.kl_coef",
    "rl.teacher",
)
_GOING_ON = frozenset(
    ("train.steps", "train.epochs", "train.micro_batch_size", "train.micro_batch_tokens")
    + ("train.on_nonfinite", "train.max_nonfinite", "data.on_error", "data.allow_http")
    + tuple(f"data.{name}" for name in WITHOUT_EFFECT)
)


def changes(before: Config, now: Config) -> dict[str, str]:
    """Return the keys whose values differ, each with both values. The key `run` does not count."""
    differences = {}
    for key in leaves():
        if key != "run" and (values := [get(cfg, key) for cfg in (now, before)])[0] != values[1]:
            shown = [repr(_PLAIN.get(key, _identity)(value))[:_LONGEST] for value in values]
            differences[key] = f"{key}={shown[0]}, was {shown[1]}"
    return differences


def changed_since(checkpoint: Path, cfg: Config, reported: Collection[str]) -> Iterator[str]:
    """Yield a line with every key that differs between a resumed run and its checkpoint, except for
    those that are reported already."""
    try:
        before = read_saved(checkpoint)
    except ConfigError:  # The checkpoint is of another version.
        return
    texts = [text for text in changes(before, cfg).values() if text not in reported]
    if texts:
        yield f"settings changed since {checkpoint.name}: {'; '.join(texts)}"


def check_unnamed(cfg: Config, overrides: Sequence[str], file: ConfigFile | None) -> None:
    """Refuse to continue an unnamed run that was another experiment."""
    folder = Path(cfg.run)
    if "run" in given_keys(overrides, file) or not any(folder.glob("checkpoints/step-*")):
        return
    try:
        before = read_saved(folder)
    except ConfigError:  # There is no run, which is refused elsewhere, or its version differs.
        return
    texts = [
        text
        for key, text in changes(before, cfg).items()
        if key.startswith(_LEARNING + _LEARNING_RL) and key not in _GOING_ON
        if key != "model.path" or not _is_same_model(before.model.path, cfg.model.path)
    ]
    if texts:
        raise ConfigError(
            f"is not set, and {folder} holds a run with other settings ({'; '.join(texts)})",
            key="run",
            remedy=f"give run=FOLDER for a new one, or run={folder} to go on with that one",
        )


def _is_same_model(pinned: str, path: str) -> bool:
    """Return whether the Hub name that a run began with has the same repository as the current
    one."""
    before, now = hub_name(pinned), hub_name(path)
    return before is not None and now is not None and before.repo == now.repo


def _identity(value: Any) -> Any:
    return value
