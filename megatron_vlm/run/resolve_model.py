"""Which files model.path means in a run: those of one commit, where it is a name on the Hub."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_vlm.config import read_saved
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import HubName, hub_name, pin


def with_model(cfg: Config, weights: bool = True) -> Config:
    """The configuration with the commit in model.path, if that is a name on the Hub: the newest
    when the run begins, and the same one whenever it is started again."""
    path = cfg.model.path
    if (name := hub_name(path)) is not None and not name.commit:
        before = _of_run(Path(cfg.run))
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
    return replace(cfg, model=replace(cfg.model, path=pin(path, weights)))


def with_commit(arguments: Sequence[str], cfg: Config) -> list[str]:
    """The arguments of a command for its processes, which then use the same commit."""
    named = [f"model.path={cfg.model.path}"] if hub_name(cfg.model.path) is not None else []
    return [*arguments, *named]


def _of_run(folder: Path) -> HubName | None:
    """The model that a run began with, if it is one of the Hub."""
    try:
        return hub_name(read_saved(folder).model.path)
    except ConfigError:  # there is no run, or not one of this version
        return None
