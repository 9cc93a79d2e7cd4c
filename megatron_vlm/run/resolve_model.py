"""Resolution of model.path in a run. A name on the Hub means the files of one commit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_vlm.config import read_saved
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import HubName, hub_name, pin


def with_model(cfg: Config, weights: bool = True) -> Config:
    """Return the configuration with the commit in model.path, if that is a name on the Hub. It is
    the newest commit when the run begins, and the same one whenever the run starts again."""
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
    """Return a command's arguments for its processes, which then use the same commit."""
    named = [f"model.path={cfg.model.path}"] if hub_name(cfg.model.path) is not None else []
    return [*arguments, *named]


def _of_run(folder: Path) -> HubName | None:
    """Return the model that a run began with, if it is on the Hub."""
    try:
        return hub_name(read_saved(folder).model.path)
    except ConfigError:  # There is no run, or it is of another version.
        return None
