"""Kinds of engines by their names, with the facts that the checks of a configuration need. Nothing
here imports torch.

A package registers an engine by an entry point of the group `megatron_vlm.engines`, whose object is
an `EngineKind`. Its name is then a value of engine.name.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

from megatron_vlm.config.schema import OWN, Config, EngineConfig
from megatron_vlm.errors import ConfigError

if TYPE_CHECKING:
    from megatron_vlm.engines.own import Draw
    from megatron_vlm.engines.sampler import Engine

GROUP = "megatron_vlm.engines"
DEFAULT_ENGINE = "vllm"  # engine of a command's --engine, unless engine.name has another
_BUILT_IN = (
    EntryPoint(OWN, f"{__name__}:OWN_DECODER", GROUP),
    EntryPoint(DEFAULT_ENGINE, "megatron_vlm.engines.vllm:VLLM", GROUP),
)


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which engines are started."""

    python: str  # Python of an environment that has the engine
    folder: str  # checkpoint to start with
    dtype: str = "auto"  # type of weights and activations
    max_len: int = 4096  # tokens of a prompt and its answer together
    pictures: int = 8  # maximum in a prompt
    videos: int = 0  # maximum in a prompt
    lora_rank: int = 0  # maximum rank of its adapters; 0: no adapters
    adapters: int = 1  # different adapters that requests in progress may name
    lora_vision: bool = False  # whether adapters have parts in the vision tower and its mergers
    options: Mapping[str, Any] = field(default_factory=dict)  # options of this engine alone
    start_s: float = 1800.0  # seconds that the engine may take to load
    devices: Sequence[str] = ()  # GPUs of each engine; (): one engine, on this process's GPUs
    top_k: int = 0  # most likely tokens that a call of `score` may ask for
    is_inspected: bool = False  # whether `inspect` is called
    has_media: bool = False  # whether its prompts are known to have pictures or videos
    reserves_media: bool = True  # whether memory is kept for the largest pictures
    memory_share: float | None = None  # share of a GPU that the trainer uses as well; null: its own
    routing_layers: Sequence[int] = ()  # layers whose experts completions have
    draft_tokens: int = 0  # tokens that the model's own head drafts before each pass
    draw: "Draw | None" = None  # how the ranks draw, for the engine that is the ranks

    @staticmethod
    def from_config(cfg: EngineConfig, folder: str, **more: Any) -> "EngineSettings":
        """Return the settings of the group `engine`, and more."""
        return EngineSettings(
            str(cfg.python),
            folder,
            devices=cfg.devices,
            options=cfg.options,
            draft_tokens=cfg.draft_tokens,
            **more,
        )


@dataclass(frozen=True)
class EngineKind:
    """An engine that is known by name: how it is started, and its limits."""

    start: Callable[[EngineSettings], Awaitable["Engine"]]
    # Describes the engine of a Python, such as "vLLM 0.32.0"; raises ConfigError for the given key
    # if that Python has none.
    version: Callable[[str, str], str]
    python: str | None = None  # what engine.python is to be; null: it is not needed
    max_lora_rank: int | None = None
    min_temperature: float = 0.0  # lowest temperature above 0
    has_grammars: bool = False  # whether answers may be held to a grammar
    has_penalties: bool = False  # whether it takes min_p, penalties, logit_bias and min_tokens
    has_routing: bool = False  # whether completions may have the experts of their tokens
    has_drafts: bool = False  # whether the model's MTP head may propose tokens
    on_ranks: bool = False  # whether it is the ranks, with the weights that they have


async def _start_own(settings: EngineSettings) -> "Engine":
    from megatron_vlm.engines.own import OwnEngine

    assert settings.draw is not None
    return OwnEngine(settings.draw)


OWN_DECODER = EngineKind(
    _start_own,
    lambda python, key: "the trainer's own decoder",
    has_grammars=True,
    has_penalties=True,
    on_ranks=True,
)


def engine_kind(name: str, key: str = "engine.name") -> EngineKind:
    """Return the engine of this name."""
    known = {each.name: each for each in (*_BUILT_IN, *entry_points(group=GROUP))}
    if name not in known:
        raise ConfigError(key=key, found=name, allowed=tuple(known))
    kind: EngineKind = known[name].load()
    return kind


async def engine_for(cfg: EngineConfig, settings: EngineSettings) -> "Engine":
    """Start the engine that the configuration names."""
    return await engine_kind(cfg.name).start(settings)


def describe_engine(cfg: EngineConfig) -> str:
    """Describe the engine, such as "vLLM 0.32.0 of PYTHON". Raise ConfigError if it is missing."""
    version = engine_kind(cfg.name).version(str(cfg.python), "engine.python")
    return version if cfg.python is None else f"{version} of {cfg.python}"


def engine_of_flags(cfg: EngineConfig, python: str, devices: Sequence[str]) -> EngineConfig:
    """Return the engine that --engine and --devices of a command ask for: that of engine.name,
    without the options for its other uses."""
    name, drafts = DEFAULT_ENGINE if cfg.name == OWN else cfg.name, cfg.draft_tokens
    return EngineConfig(name, python, tuple(devices), draft_tokens=drafts)


def check_engine(cfg: Config, group: Literal["rl", "serve"]) -> None:
    """Refuse an engine that could not be started, or settings of an engine that is not started."""
    engine = cfg.engine
    scorer = engine_kind(cfg.teacher.engine, "teacher.engine") if group == "rl" else OWN_DECODER
    check_python(cfg, scorer, f"teacher.engine={cfg.teacher.engine}")
    if not isinstance(engine.options, dict):
        raise ConfigError(key="engine.options", found=engine.options, allowed="{NAME: VALUE}")
    if group == "rl" and cfg.rl.replay_routing and not engine_kind(engine.name).has_routing:
        raise ConfigError(
            "needs an engine that returns the experts of each token, and "
            f"engine.name={engine.name} does not",
            key="rl.replay_routing",
            found=True,
            remedy=f"give engine.name={DEFAULT_ENGINE}, or set rl.replay_routing=false",
        )
    kind = engine_kind(engine.name)
    if engine.draft_tokens and not kind.has_drafts:
        raise ConfigError(
            f"needs an engine that drafts, and engine.name={engine.name} does not",
            key="engine.draft_tokens",
            found=engine.draft_tokens,
            remedy=f"give engine.name={DEFAULT_ENGINE}, or set engine.draft_tokens=0",
        )
    if kind.on_ranks:
        if (engine.python and scorer.on_ranks) or engine.devices or engine.options:
            raise ConfigError(
                "starts no engine, and engine.python, engine.devices or engine.options is set",
                key="engine.name",
                found=engine.name,
                remedy=f"give engine.name={DEFAULT_ENGINE}, or leave them out",
            )
        return
    check_python(cfg, kind, f"engine.name={engine.name}")
    if cfg.data.add_tokens:
        raise ConfigError(
            "starts an engine from model.path, which lacks the tokens of data.add_tokens",
            key="engine.name",
            found=engine.name,
            remedy="export a model that has them first, or choose engine.name=own",
        )
    if cfg.lora.base is not None:
        raise ConfigError(
            "stores the weights of the ranks in other values than those that an engine loads, and "
            f"engine.name={engine.name} would sample from another model",
            key="lora.base",
            found=cfg.lora.base,
            remedy="choose engine.name=own, or set lora.base=null",
        )
    key, rank = "lora.rank", cfg.lora.rank
    if group == "serve":
        key, rank = "serve.max_rank", cfg.serve.max_rank
    if kind.max_lora_rank is not None and rank > kind.max_lora_rank:
        raise ConfigError(
            f"exceeds the rank that engine.name={engine.name} takes",
            key=key,
            found=rank,
            allowed=range(1, kind.max_lora_rank + 1),
            remedy=f"give at most {kind.max_lora_rank}, or choose engine.name=own",
        )


def check_python(cfg: Config, kind: EngineKind, needed_by: str) -> None:
    """Refuse an engine that needs the Python of another environment, if none is given."""
    if kind.python is not None and cfg.engine.python is None:
        raise ConfigError(
            f"is not set, and {needed_by} needs it",
            key="engine.python",
            remedy=f"give {kind.python}",
        )
