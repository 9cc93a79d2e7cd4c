"""The configuration that a run begins or continues with, compared with the one in its folder: the
commit that a name on the Hub meant when the run began, and keys that have changed since."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vlm.config import read_saved
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.data_sources import WITHOUT_EFFECT, plain_sets, plain_sources
from megatron_vlm.config.load import given_keys
from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.config.teachers import ALL_SOURCES, teachers_of
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.io.hub import hub_name, pin

_LONGEST = 200  # characters of a value
# Keys that make a run another experiment, since they change what it learns from, and how. A run may
# continue for longer.
_LEARNING = (
    *("model.path", "model.freeze", "model.router", "lora.", "data.", "optim.", "train."),
    *("preference.", "reward.", "distill.", "embed.", "rerank.", "teacher.", "rl.reward"),
    *("rl.environment", "rl.agent", "rl.samples", "rl.loss", "rl.advantage", "rl.kl_coef"),
)
_GOING_ON = frozenset(
    ("train.steps", "train.epochs", "train.micro_batch_size", "train.micro_batch_tokens")
    + ("train.on_nonfinite", "train.max_nonfinite", "data.allow_http")
    + tuple(f"data.{name}" for name in WITHOUT_EFFECT)
)


def saved_config(folder: Path) -> Config | None:
    """Return the configuration of a run or a checkpoint; None where there is none. One with which
    this version cannot go on is a ConfigError."""
    if read_mark(folder) is None or not os.path.lexists(folder / "config.yaml"):
        return None
    return read_saved(folder)


def with_model(cfg: Config, weights: bool = True, saved: Config | None = None) -> Config:
    """Return the configuration with the commits in model.path and teacher.path, where these name
    models on the Hub. They are the newest commits when the run begins, and the same ones whenever
    the run starts again, from `saved`."""
    path = cfg.model.path
    if (name := hub_name(path)) is not None and not name.commit:
        before = None if saved is None else hub_name(saved.model.path)
        if before is not None and before.repo == name.repo and before.commit:
            path = str(before)
            if name.revision and pin(cfg.model.path) != path:
                raise ConfigError(
                    f"is another commit now than {before.commit}, with which run={cfg.run} began",
                    key="model.path",
                    found=str(name),
                    remedy=f"give model.path={name.repo} to go on with that one, or another "
                    "run=FOLDER",
                )
    model = replace(cfg.model, path=pin(path, weights))
    teacher = replace(cfg.teacher, path=_teachers_with_commits(cfg, saved))
    return replace(cfg, model=model, teacher=teacher)


def _teachers_with_commits(cfg: Config, saved: Config | None) -> str | dict[str, Any] | None:
    """Return the value of teacher.path with the commits that the run began with. A name with a
    revision of its own gets the commit that this is now."""
    before, now = teachers_of(saved), teachers_of(cfg)
    pinned = {}
    for source, path in now.items():
        name, known = hub_name(path), hub_name(before.get(source, ""))
        if name is not None and known is not None and known.repo == name.repo and not name.revision:
            path = str(known)
        pinned[source] = pin(path)
    return pinned.get(ALL_SOURCES, pinned) if pinned else cfg.teacher.path


def with_commit(arguments: Sequence[str], cfg: Config) -> list[str]:
    """Return a command's arguments for its processes, which then use the same commit."""
    named = [f"model.path={cfg.model.path}"] if hub_name(cfg.model.path) is not None else []
    teachers = teachers_of(cfg)
    if any(hub_name(path) is not None for path in teachers.values()):
        entries = ", ".join(f"{source}: '{path}'" for source, path in teachers.items())
        named.append(f"teacher.path={teachers.get(ALL_SOURCES, f'{{{entries}}}')}")
    return [*arguments, *named]


def changes(before: Config, now: Config) -> dict[str, str]:
    """Return the keys whose values differ, each with both values. The key `run` does not count."""
    differences = {}
    for key in leaves():
        new, old = (_MEANT[key](cfg) if key in _MEANT else get(cfg, key) for cfg in (now, before))
        if key != "run" and new != old:
            differences[key] = f"{key}={new!r:.{_LONGEST}}, was {old!r:.{_LONGEST}}"
    return differences


def _divergence(cfg: Config) -> str | None:
    """Return the divergence that distill.divergence means; None without a teacher."""
    default = "forward" if cfg.train.objective == "distill" else "reverse"
    return None if cfg.teacher.path is None else cfg.distill.divergence or default


# Keys whose values are written in several ways, or mean something only beside other keys.
_MEANT: dict[str, Callable[[Config], Any]] = {
    "data.train": lambda cfg: plain_sources(cfg.data.train),
    "data.eval": lambda cfg: plain_sets(cfg.data.eval),
    "distill.divergence": _divergence,
}


def changed_since(checkpoint: Path, cfg: Config, reported: Collection[str]) -> Iterator[str]:
    """Yield a line with every key that differs between a resumed run and its checkpoint, except for
    those that are reported already."""
    before = saved_config(checkpoint)
    differences = {} if before is None else changes(before, cfg)
    if texts := [text for text in differences.values() if text not in reported]:
        yield f"settings changed since {checkpoint.name}: {'; '.join(texts)}"


def check_unnamed(cfg: Config, overrides: Sequence[str], file: ConfigFile | None) -> Config | None:
    """Refuse to continue an unnamed run that was another experiment. Return its configuration."""
    folder = Path(cfg.run)
    before = saved_config(folder)
    is_named = "run" in given_keys(overrides, file)
    if before is None or is_named or not any(folder.glob("checkpoints/step-*")):
        return before
    texts = [
        text
        for key, text in changes(before, cfg).items()
        if key.startswith(_LEARNING) and key not in _GOING_ON
        if key != "model.path" or not _is_same_model(before.model.path, cfg.model.path)
    ]
    if texts:
        raise ConfigError(
            f"is not set, and {folder} holds a run with other settings ({'; '.join(texts)})",
            key="run",
            remedy=f"give run=FOLDER for a new one, or run={folder} to go on with that one",
        )
    return before


def _is_same_model(pinned: str, path: str) -> bool:
    """Return whether both names are of one repository on the Hub."""
    before, now = hub_name(pinned), hub_name(path)
    return before is not None and now is not None and before.repo == now.repo
