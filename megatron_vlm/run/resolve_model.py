"""Resolution of model.path and rl.teacher in a run. A name on the Hub means the files of one
commit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vlm.config import read_saved
from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import teachers_of
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import hub_name, pin


def with_model(cfg: Config, weights: bool = True) -> Config:
    """Return the configuration with the commits in model.path and rl.teacher, where these are names
    on the Hub. They are the newest commits when the run begins, and the same ones whenever the run
    starts again."""
    path = cfg.model.path
    saved = _saved_config(Path(cfg.run))
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
    teacher = _with_commits(cfg.rl.teacher, None if saved is None else saved.rl.teacher)
    return replace(
        cfg,
        model=replace(cfg.model, path=pin(path, weights)),
        rl=replace(cfg.rl, teacher=teacher),
    )


def _with_commits(teacher: Any, saved: Any) -> Any:
    """Return the value of rl.teacher with the commits that the run began with. A name with a
    revision of its own gets the commit that this is now."""
    before = teachers_of(saved)
    pinned = {}
    for source, path in teachers_of(teacher).items():
        name, known = hub_name(path), hub_name(before.get(source, ""))
        if name is not None and known is not None and known.repo == name.repo and not name.revision:
            path = str(known)
        pinned[source] = pin(path)
    return next(iter(pinned.values())) if isinstance(teacher, str) else pinned or None


def with_commit(arguments: Sequence[str], cfg: Config) -> list[str]:
    """Return a command's arguments for its processes, which then use the same commit."""
    named = [f"model.path={cfg.model.path}"] if hub_name(cfg.model.path) is not None else []
    teachers = teachers_of(cfg.rl.teacher)
    if any(hub_name(path) is not None for path in teachers.values()):
        entries = ", ".join(f"{source}: '{path}'" for source, path in teachers.items())
        is_single = isinstance(cfg.rl.teacher, str)
        named.append(f"rl.teacher={cfg.rl.teacher if is_single else f'{{{entries}}}'}")
    return [*arguments, *named]


def _saved_config(folder: Path) -> Config | None:
    """Return the configuration that a run began with."""
    try:
        return read_saved(folder)
    except ConfigError:  # There is no run, or it is of another version.
        return None
