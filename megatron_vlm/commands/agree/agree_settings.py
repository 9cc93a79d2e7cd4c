"""Arguments of `megatron-vlm agree WHERE`, checked without torch."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_vlm.commands.eval import add_where, locate
from megatron_vlm.config import ConfigFile
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError


def add_agree_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and of each of its processes."""
    add_where(parser, "a Hugging Face folder or a name on the Hub")
    python = "of the environment that has vLLM, such as .venv-vllm/bin/python (required)"
    parser.add_argument("--engine", metavar="PYTHON", help=python)
    devices = "CUDA_VISIBLE_DEVICES of the engine (default: as here)"
    parser.add_argument("--devices", metavar="LIST", help=devices)
    samples = "prompts, spread over the data (default: 16)"
    parser.add_argument("--samples", type=int, default=16, metavar="N", help=samples)
    tokens = "of an answer, at most (default: 32)"
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help=tokens)
    heat = "at which answers are drawn; 0: the likeliest token each time (default: 1)"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help=heat)
    bound = "the largest difference of a log-prob (default: 1e-4 in fp32, 0.25 in bf16)"
    parser.add_argument("--bound", type=float, metavar="X", help=bound)
    page = "also write one self-contained page with the worst tokens and their pictures"
    parser.add_argument("--html", metavar="FILE", help=page)


@dataclass(frozen=True)
class AgreeSettings:
    """Settings of the engine, of the samples and of the comparison."""

    engine: str
    devices: str | None
    samples: int
    max_tokens: int
    temperature: float
    bound: float | None
    html: str | None

    @staticmethod
    def from_arguments(args: argparse.Namespace) -> "AgreeSettings":
        """Read the settings from the command line; raise ConfigError for impossible numbers."""
        if args.engine is None:
            raise ConfigError(
                "is not set",
                key="--engine",
                remedy="give the python of an environment that has vLLM; `make vllm-env` builds "
                "one for the CPU, with .venv-vllm/bin/python",
            )
        for name, value in (("samples", args.samples), ("max-tokens", args.max_tokens)):
            if value < 1:
                raise ConfigError(key=f"--{name}", found=value, allowed="at least 1")
        if not 0 <= args.temperature < math.inf:
            raise ConfigError(
                key="--temperature", found=args.temperature, allowed="a finite number, 0 or more"
            )
        if args.bound is not None and not 0 < args.bound < math.inf:
            raise ConfigError(key="--bound", found=args.bound, allowed="a finite number above 0")
        names = [each.name for each in fields(AgreeSettings)]
        return AgreeSettings(**{name: getattr(args, name) for name in names})

    @property
    def words(self) -> list[str]:
        """The settings as arguments of the other processes."""
        values = {name.replace("_", "-"): value for name, value in vars(self).items()}
        return [f"--{name}={value}" for name, value in values.items() if value is not None]


def locate_checkpoint(
    where: str, overrides: Sequence[str], file: ConfigFile | None
) -> tuple[Config, Path | None]:
    """Return the configuration and the checkpoint, which is None for a Hugging Face folder."""
    cfg, checkpoint = locate(where, overrides, file, needs="model.path")
    if not prompts_of(cfg):
        raise ConfigError(
            "is not set, and neither is data.train",
            key="data.eval",
            remedy="give prompts: data.eval=FILE",
        )
    if any(spec.streaming for spec in prompts_of(cfg)):
        raise ConfigError(
            "is a stream, and prompts are taken from the whole of the data",
            key="data.eval" if cfg.data.eval else "data.train",
            remedy="give a file with some of its records: data.eval=FILE",
        )
    if cfg.lora.rank:
        raise ConfigError(
            ": the engine gets whole weights, without adapters",
            key="lora.rank",
            found=cfg.lora.rank,
            remedy="write them merged, megatron-vlm export RUN DIR --as merged, and give that "
            "folder",
        )
    if cfg.data.add_tokens:
        raise ConfigError(
            ": the engine begins with the model's own vocabulary",
            key="data.add_tokens",
            found=cfg.data.add_tokens,
            remedy="write a folder with megatron-vlm export RUN DIR, and give that one",
        )
    return cfg, checkpoint


def prompts_of(cfg: Config) -> tuple[SourceSpec, ...]:
    """Return the sources of the prompts."""
    return tuple(each.source for each in cfg.data.eval) or cfg.data.train
