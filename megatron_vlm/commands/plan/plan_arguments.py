"""The command line of `megatron-vlm plan`."""

import argparse
import re
from collections.abc import Sequence

from megatron_vlm.config import ConfigFile, config_dir
from megatron_vlm.config.arguments import add_overrides
from megatron_vlm.config.load import given_keys
from megatron_vlm.errors import ConfigError

_UNITS = {"GIB": 2**30, "GB": 10**9, "TIB": 2**40, "TB": 10**12, "": 2**30}
_MEMORY = {
    "--memory": (2**40, "the memory of one GPU, such as 80GiB"),
    "--host-memory": (2**45, "the memory of one machine, such as 512GiB"),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|GB|TiB|TB|)", re.IGNORECASE)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. Importing this file imports no large package."""
    add_overrides(parser)
    gpus = "how many there are (default: 8)"
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help=gpus)
    memory = "of each GPU, such as 80GiB (default: that of --gpu)"
    parser.add_argument("--memory", metavar="SIZE", help=memory)
    name = "whose speed is assumed, such as A100 or H200 (default: H100)"
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=name)
    share = "of the peak, what matrix products reach (default: 0.6)"
    parser.add_argument("--efficiency", type=float, default=0.6, metavar="X", help=share)
    host = "of host memory in a machine, such as 1TiB (default: not limited)"
    parser.add_argument("--host-memory", metavar="SIZE", help=host)
    link = "GB/s between a GPU and host memory (default: that of --gpu)"
    parser.add_argument("--host-link", type=float, metavar="X", help=link)
    fit = "propose the switches that make the model fit, the fastest first"
    parser.add_argument("--fit", action="store_true", help=fit)
    page = "also write one self-contained page with the pipeline drawn"
    parser.add_argument("--html", metavar="FILE", help=page)


def with_known_sizes(overrides: Sequence[str], file: ConfigFile | None) -> list[str]:
    """Return the overrides of a plan without a model and data, with the sizes that lie beside the
    recipe, if it has them, as the model."""
    recipes = [] if file is None else [file.recipes.get("model", "")]
    recipes += [word.partition("=")[2] for word in overrides if word.startswith("model=")]
    folder = config_dir() / "model" / (recipes or [""])[-1]
    is_known = (folder / "config.json").is_file()
    if not is_known or {"model.path", "data.train"} & given_keys(overrides, file):
        return list(overrides)
    return [*overrides, f"model.path='{folder}'"]


def parse_memory(text: str, option: str = "--memory") -> float:
    """Return the bytes of --memory or --host-memory."""
    most, allowed = _MEMORY[option]
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 2**30 <= size <= most:
        raise ConfigError(key=option, found=text, allowed=allowed)
    return size
