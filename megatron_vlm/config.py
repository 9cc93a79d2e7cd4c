"""The one configuration: frozen dataclasses, filled by Hydra from `configs/` and `key=value`."""

import difflib
import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint, computed how, and which of its parts learn."""

    path: str = MISSING  # folder of a Hugging Face Qwen3-VL checkpoint
    backend: str = "torch"  # core attention and layers: torch (SDPA) | te (Transformer Engine)
    recompute: str = "none"  # decoder activations: none | selective (attention) | full
    recompute_vision: bool = False  # recompute each block of the vision tower
    share_images: bool = True  # TP ranks share out the images instead of each encoding all
    freeze_vision: bool = False  # the vision tower without its mergers
    freeze_merger: bool = False  # the projector and the DeepStack projectors
    freeze_language: bool = False  # embedding, decoder and head


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism; data parallelism is what is left of the world size."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1  # only 1: see constraints.py
    sequence_parallel: bool = False  # only false: see constraints.py
    layers_per_stage: list[int] | None = None  # e.g. [0, 12, 12, 12]; null: balanced
    distributed_optimizer: bool = True  # shard optimizer state over the DP ranks
    overlap_grad_reduce: bool = False  # reduce gradients while the last backward still runs


@dataclass(frozen=True)
class DataConfig:
    """Where records come from, and how each becomes tokens and patches. See docs/data.md."""

    train: Any = None  # a path or name, {path: ..., weight: ...}, or a list of those
    eval: Any = None  # the same
    image_root: str | None = None  # images lie inside; null: the folder of the file that names them
    allow_http: bool = False  # fetch http(s) images, from public addresses only
    exif_orientation: bool = True  # turn pictures as their camera says
    min_pixels: int | None = None  # of a resized image; null: as the checkpoint says
    max_pixels: int | None = None
    max_images: int | None = None  # of one record
    max_tokens: int = 8192  # of one record, images included
    truncation: str = "error"  # error | drop | image_safe: a record beyond the two limits
    train_on: Any = "all_assistant"  # all_assistant | last_assistant | record | [roles]
    special_tokens: str = "refuse"  # refuse | escape: text that spells a special token
    on_error: str = "raise"  # raise | skip: a record that is wrong
    max_errors: int = 100  # skipped records after which the run stops all the same
    cache_dir: str | None = "~/.cache/megatron_vlm"  # encoded text; null: none is kept
    num_workers: int = 2  # processes of each replica that decode ahead of the step
    prefetch: int = 2  # batches ahead, for each of them
    shuffle: bool = True
    shuffle_window: int = 1000  # records of a stream that are shuffled together
    seed: int = 0  # of the order


@dataclass(frozen=True)
class OptimConfig:
    """AdamW."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # not applied to norms and biases
    clip_grad: float = 1.0  # global norm; 0 turns clipping off


@dataclass(frozen=True)
class TrainConfig:
    """How a batch becomes a step."""

    global_batch_size: int = 8  # samples of one step, over all data parallel ranks
    micro_batch_size: int = 1  # rows in one micro-batch
    micro_batch_tokens: int | None = None  # instead: as many rows as make so many tokens, padded
    precision: str = "auto"  # auto (bf16 on cuda, fp32 on cpu) | fp32 | bf16
    seed: int = 0
    packing: bool = False  # only false: see constraints.py


@dataclass(frozen=True)
class Config:
    """All of it. Never changed after `load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    platform: str = "auto"  # auto | cuda | cpu
    timeout_minutes: float = 10.0  # a collective that waits longer than this ends the job


def config_dir() -> Path:
    """The folder of YAML files: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def load_config(overrides: list[str], config_name: str = "train") -> Config:
    """Compose `configs/<config_name>.yaml` and `key=value` overrides into a checked Config."""
    _check_keys(overrides)
    ConfigStore.instance().store(name="schema", node=_schema())
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
            composed = compose(config_name, overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, Config)
    return config


def _schema() -> DictConfig:
    """The dataclasses as Hydra's schema. OmegaConf makes frozen ones read-only, but composing has
    to fill them in; the objects that `load_config` returns are frozen again."""
    schema = OmegaConf.structured(Config)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, False)
    return schema


def known_keys(node: Any = Config, prefix: str = "") -> list[str]:
    """Every key of the configuration in dotted form."""
    keys = []
    for item in fields(node):
        keys.append(prefix + item.name)
        if is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def _check_keys(overrides: list[str]) -> None:
    """Refuse an override of a key that does not exist, with the nearest one that does."""
    keys = known_keys()
    for override in overrides:
        key = re.split("=", override.lstrip("+~"), maxsplit=1)[0]
        if key not in keys and not key.startswith("hydra"):
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key!r} is not a configuration key{hint}")


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, without their layers."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is not set; give it as {error.full_key}=VALUE"
    full_key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    first_line = str(error.__cause__ or error).splitlines()[0]
    return f"{full_key or 'configuration'}: {first_line}"
