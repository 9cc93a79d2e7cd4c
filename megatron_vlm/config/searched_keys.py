"""Keys that the planner chooses: `parallel.auto`, which the recipe parallel=auto sets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError

# What `megatron-vlm plan` searches over.
SEARCHED = (
    "parallel.tp",
    "parallel.pp",
    "parallel.ep",
    "parallel.layers_per_stage",
    "train.micro_batch_tokens",
    "model.recompute",
    "model.recompute_vision",
)


def searched_keys(cfg: Config) -> frozenset[str]:
    """Return the keys that a search may choose. Without parallel.auto it may choose all of them."""
    return frozenset(cfg.parallel.auto or SEARCHED)


def without_given(cfg: Config, overrides: Sequence[str], in_file: Sequence[str]) -> Config:
    """Return the configuration in which the planner leaves the keys that the user gave. ~KEY takes
    a key back. Chunks, which it does not search over, replace what a recipe leaves to it."""
    if not cfg.parallel.auto:
        return cfg
    given = set(in_file)
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        (given.discard if override.startswith("~") else given.add)(key)
    if "train.micro_batch_size" in given:
        given.add("train.micro_batch_tokens")  # The number of tokens would have priority.
    auto = tuple(key for key in cfg.parallel.auto if key not in given)
    if cfg.parallel.virtual_stages > 1 and not given & {"parallel", "parallel.auto"}:
        auto = ()
    if cfg.parallel.layers_per_stage == "auto":
        auto = tuple(dict.fromkeys((*auto, "parallel.layers_per_stage")))
    return replace(cfg, parallel=replace(cfg.parallel, auto=auto))


def check_auto(cfg: Config) -> None:
    """Refuse keys that the planner does not choose, and settings that it cannot work with."""
    parallel = cfg.parallel
    for name in parallel.auto:
        if name not in SEARCHED:
            raise ConfigError(
                key="parallel.auto",
                found=list(parallel.auto),
                allowed=f"all, or names of keys among {', '.join(SEARCHED)}",
            )
    if parallel.auto and parallel.virtual_stages > 1:
        raise ConfigError(
            ": parallel.auto searches over layouts without chunks",
            key="parallel.virtual_stages",
            found=parallel.virtual_stages,
            remedy="leave it out, or give parallel.tp and parallel.pp in place of parallel=auto",
        )
    if "parallel.tp" in parallel.auto and cfg.launch.backend == "ray":
        raise ConfigError(
            "places the ranks by parallel.tp before the layout is planned",
            key="launch.backend",
            found="ray",
            remedy="give parallel.tp=N, such as the one that megatron-vlm plan prints",
        )


def check_layers(layers: Any, virtual_stages: int) -> None:
    listed = isinstance(layers, list) and all(type(count) is int for count in layers)
    if not (listed or layers in (None, "auto")):
        raise ConfigError(
            key="parallel.layers_per_stage",
            found=layers,
            allowed="auto, or a list with one whole number for each stage, such as [0,12,12,12]",
        )
    if layers == "auto" and virtual_stages > 1:
        raise ConfigError(
            "chooses the layers of stages, not of the chunks that "
            f"parallel.virtual_stages={virtual_stages} makes of them",
            key="parallel.layers_per_stage",
            found=layers,
            allowed="a list, or null",
        )
