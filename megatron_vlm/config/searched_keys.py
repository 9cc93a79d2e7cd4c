"""Keys that the planner chooses: `parallel.auto`, which the recipe parallel=auto sets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_vlm.config.schema import Config, check_of
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


@check_of
def check_auto(cfg: Config) -> Iterator[ConfigError]:
    """Refuse keys that the planner does not choose, and settings that it cannot work with."""
    parallel = cfg.parallel
    for name in parallel.auto:
        if name not in SEARCHED:
            yield ConfigError(
                key="parallel.auto", allowed=f"all, or names of keys among {', '.join(SEARCHED)}"
            )
    if parallel.auto and parallel.virtual_stages > 1:
        yield ConfigError(
            ": parallel.auto searches over layouts without chunks",
            key="parallel.virtual_stages",
            remedy="leave it out, or give parallel.tp and parallel.pp in place of parallel=auto",
        )
    if "parallel.tp" in parallel.auto and cfg.launch.backend == "ray":
        yield ConfigError(
            "places the ranks by parallel.tp before the layout is planned",
            key="launch.backend",
            remedy="give parallel.tp=N, such as the one that megatron-vlm plan prints",
        )


@check_of
def check_layers(cfg: Config) -> Iterator[ConfigError]:
    """Refuse layers of stages that are no list of numbers, or that chunks would make of auto."""
    layers, virtual_stages = cfg.parallel.layers_per_stage, cfg.parallel.virtual_stages
    listed = isinstance(layers, list) and all(type(count) is int for count in layers)
    if not (listed or layers in (None, "auto")):
        yield ConfigError(
            key="parallel.layers_per_stage",
            allowed="auto, or a list with one whole number for each stage, such as [0,12,12,12]",
        )
    if layers == "auto" and virtual_stages > 1:
        yield ConfigError(
            "chooses the layers of stages, not of the chunks that "
            f"parallel.virtual_stages={virtual_stages} makes of them",
            key="parallel.layers_per_stage",
            allowed="a list, or null",
        )
